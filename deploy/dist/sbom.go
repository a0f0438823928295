package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"fmt"
	"io"
	"path"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// bom says which modules each program is made of, as the programs say themselves, in CycloneDX's JSON.
func (r *release) bom(w io.Writer, all []file) error {
	product := cdx.Component{BOMRef: "keelson", Type: cdx.ComponentTypeApplication, Name: "keelson", Version: r.version}
	components, made := map[string]cdx.Component{}, map[string][]string{}
	for _, f := range all {
		if f.mode != 0o755 {
			continue
		}
		name := path.Base(f.at)
		info, err := buildinfo.ReadFile(f.source)
		if err != nil {
			return fmt.Errorf("what %s is made of: %w", name, err)
		}
		sum, err := sumOf(f.source)
		if err != nil {
			return err
		}
		ref := "file:" + f.at
		components[ref] = cdx.Component{BOMRef: ref, Type: cdx.ComponentTypeApplication, Name: name, Version: r.version,
			Hashes: &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: fmt.Sprintf("%x", sum)}}}
		made[product.BOMRef] = append(made[product.BOMRef], ref)
		for _, m := range append([]*debug.Module{{Path: "stdlib", Version: info.GoVersion}}, info.Deps...) {
			if m.Replace != nil {
				m = m.Replace
			}
			c := module(m.Path, m.Version)
			components[c.BOMRef] = c
			made[ref] = append(made[ref], c.BOMRef)
		}
		for _, l := range r.linked {
			program, library, _ := strings.Cut(l, "=")
			if program != name {
				continue
			}
			lib, version, ok := strings.Cut(library, "@")
			if !ok {
				return fmt.Errorf("-linked %s: want PROGRAM=LIBRARY@VERSION", l)
			}
			c := cdx.Component{BOMRef: "pkg:generic/" + library, Type: cdx.ComponentTypeLibrary, Name: lib, Version: version, PackageURL: "pkg:generic/" + library}
			components[c.BOMRef] = c
			made[ref] = append(made[ref], c.BOMRef)
		}
	}
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{Timestamp: r.when.Format(time.RFC3339), Component: &product}
	seed := sha256.Sum256([]byte(r.name() + fmt.Sprint(r.when.Unix())))
	seed[6], seed[8] = seed[6]&0x0f|0x80, seed[8]&0x3f|0x80 // a UUID of version 8: of a kind of one's own
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

func module(name, version string) cdx.Component {
	url := "pkg:golang/" + name + "@" + version
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
