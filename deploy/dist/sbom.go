package main

import (
	"crypto/sha256"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// bom writes the software bill of materials in CycloneDX's JSON: the modules and C libraries of
// each program in all, the files of the release. The build information of a program lists its
// modules.
func (r *release) bom(w io.Writer, all []file) error {
	programs, err := r.programs(all)
	if err != nil {
		return err
	}
	libraries, err := r.libraries(programs)
	if err != nil {
		return err
	}
	product := cdx.Component{BOMRef: "keelson", Type: cdx.ComponentTypeApplication, Name: "keelson", Version: r.version}
	components, made := map[string]cdx.Component{}, map[string][]string{}
	for _, p := range programs {
		version := r.version
		if m := p.foreign(); m != nil {
			version = m.Version
		}
		components[p.ref] = cdx.Component{BOMRef: p.ref, Type: cdx.ComponentTypeApplication, Name: p.name,
			Version: version,
			Hashes:  &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: fmt.Sprintf("%x", p.sum)}}}
		made[product.BOMRef] = append(made[product.BOMRef], p.ref)
		parts := libraries[p.name]
		for _, m := range p.modules() {
			parts = append(parts, library("golang", m.Path, m.Version))
		}
		for _, c := range parts {
			components[c.BOMRef] = c
			made[p.ref] = append(made[p.ref], c.BOMRef)
		}
	}
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{Timestamp: r.when.Format(time.RFC3339), Component: &product}
	seed := sha256.Sum256([]byte(r.name() + fmt.Sprint(r.when.Unix())))
	seed[6], seed[8] = seed[6]&0x0f|0x80, seed[8]&0x3f|0x80 // a UUID of version 8 (custom)
	bom.SerialNumber = fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", seed[:4], seed[4:6], seed[6:8], seed[8:10], seed[10:16])
	list, dependencies := []cdx.Component{}, []cdx.Dependency{}
	for _, ref := range sorted(components) {
		list = append(list, components[ref])
	}
	for _, ref := range sorted(made) {
		of := slices.Clone(made[ref])
		slices.Sort(of)
		of = slices.Compact(of)
		dependencies = append(dependencies, cdx.Dependency{Ref: ref, Dependencies: &of})
	}
	bom.Components, bom.Dependencies = &list, &dependencies
	return cdx.NewBOMEncoder(w, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom)
}

// libraries returns the C libraries of each program that is linked to C libraries, by the program's
// name.
func (r *release) libraries(programs []program) (map[string][]cdx.Component, error) {
	all := map[string][]cdx.Component{}
	for _, l := range r.linked {
		name, of, _ := strings.Cut(l, "=")
		lib, version, _ := strings.Cut(of, "@")
		if name == "" || lib == "" || version == "" {
			return nil, fmt.Errorf("-linked %s: want PROGRAM=LIBRARY@VERSION", l)
		}
		if !slices.ContainsFunc(programs, func(p program) bool { return p.name == name }) {
			return nil, fmt.Errorf("-linked %s: the release has no program %s", l, name)
		}
		all[name] = append(all[name], library("generic", lib, version))
	}
	return all, nil
}

// library returns the CycloneDX component for a library that a program contains. kind is "golang"
// for a Go module and "generic" for a C library.
func library(kind, name, version string) cdx.Component {
	url := "pkg:" + kind + "/" + name + "@" + version
	return cdx.Component{BOMRef: url, Type: cdx.ComponentTypeLibrary, Name: name, Version: version, PackageURL: url}
}

func sorted[V any](m map[string]V) []string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
