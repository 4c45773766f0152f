// One function per source file that Python sees something of.
#pragma once

#include <nanobind/nanobind.h>

namespace kvstrata {

void bind_arena(nanobind::module_& m);
void bind_attend(nanobind::module_& m);
void bind_entries(nanobind::module_& m);
void bind_codec(nanobind::module_& m);
void bind_echo(nanobind::module_& m);
void bind_mass(nanobind::module_& m);
void bind_norms(nanobind::module_& m);
void bind_units(nanobind::module_& m);

}  // namespace kvstrata
