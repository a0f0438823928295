package openapi

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/kube-openapi/pkg/aggregator"
	"k8s.io/kube-openapi/pkg/validation/spec"
)

// Part is the part of another API server's OpenAPI v2 document that belongs to one group version.
// NewPart validates it.
type Part struct {
	root string // document path of the group version: "apis/apps/v1"
	data []byte // JSON
	sum  [sha256.Size]byte
}

// gvkExtension is the extension of a definition that lists the kinds that the definition is the
// schema of.
const gvkExtension = "x-kubernetes-group-version-kind"

// NewPart returns the part of another API server's v2 document that belongs to the group version
// gv. The part has the paths below gv and the definitions that they use. Definitions keep only
// kinds of gv in gvkExtension. The server may be hostile, so the document must be valid in JSON and
// in protobuf.
func NewPart(data []byte, gv schema.GroupVersion) (p *Part, err error) {
	defer func() {
		if r := recover(); r != nil { // the libraries do not validate their input
			p, err = nil, fmt.Errorf("the OpenAPI document of %s cannot be read: %v", gv, r)
		}
	}()
	var all spec.Swagger
	if err := json.Unmarshal(data, &all); err != nil {
		return nil, fmt.Errorf("decoding the OpenAPI document of %s: %w", gv, err)
	}
	if all.Paths == nil {
		return nil, fmt.Errorf("the OpenAPI document of %s has no paths", gv)
	}
	where := rootOf(gv)
	own := aggregator.FilterSpecByPathsWithoutSideEffects(&all, []string{"/" + where + "/"})
	kept := &spec.Swagger{SwaggerProps: spec.SwaggerProps{
		Swagger: "2.0", Info: &spec.Info{InfoProps: spec.InfoProps{Title: "Part", Version: "v1"}},
		Paths: &spec.Paths{Paths: own.Paths.Paths}, Definitions: own.Definitions, Parameters: own.Parameters,
	}}
	for name, d := range kept.Definitions {
		claimOwn(&d, gv)
		kept.Definitions[name] = d
	}
	out, err := json.Marshal(kept)
	if err != nil {
		return nil, fmt.Errorf("encoding the OpenAPI document of %s: %w", gv, err)
	}
	if _, _, _, err := protoSections(out, false); err != nil {
		return nil, fmt.Errorf("the OpenAPI document of %s is none: %w", gv, err)
	}
	return &Part{root: where, data: out, sum: sha256.Sum256(out)}, nil
}

// claimOwn removes all kinds of other group versions from the gvkExtension of a definition.
func claimOwn(d *spec.Schema, gv schema.GroupVersion) {
	list, ok := d.Extensions[gvkExtension].([]any)
	if !ok {
		delete(d.Extensions, gvkExtension)
		return
	}
	var kept []any
	for _, one := range list {
		if m, ok := one.(map[string]any); ok && m["group"] == gv.Group && m["version"] == gv.Version {
			kept = append(kept, one)
		}
	}
	if d.Extensions[gvkExtension] = kept; len(kept) == 0 {
		delete(d.Extensions, gvkExtension)
	}
}

// Size returns the number of bytes of the part.
func (p *Part) Size() int { return len(p.data) }

// ServeMerged serves /openapi/v2 with this server's document and the parts of other API servers.
func (s *Spec) ServeMerged(w http.ResponseWriter, r *http.Request, parts []*Part) {
	s.mu.Lock()
	if key := keyOf(parts); key != s.partsKey {
		s.parts, s.partsKey = parts, key
		s.forget(mergedV2)
		s.forget(mergedV2 + ".pb")
	}
	s.mu.Unlock()
	s.serve(w, r, mergedV2, protoV2)
}

// mergedV2 names the v2 document that includes the parts of other API servers.
const mergedV2 = "v2+"

func keyOf(parts []*Part) string {
	sum := sha256.New()
	for _, p := range parts {
		_, _ = sum.Write(p.sum[:])
	}
	return string(sum.Sum(nil))
}

// merge adds the parts to the sections of a v2 document, in new pieces. The existing pieces do not
// change.
func (s *Spec) merge(x *sections, of []topic, parts []*Part, f form) error {
	here := &said{spec: s, topics: of}
	var err error
	if here.types, err = s.typesOf(of); err != nil {
		return err
	}
	m := newMerger(here)
	for _, p := range parts {
		_ = m.add(p) // a part that cannot be merged is left out
	}
	defer s.working()()
	var more sections
	for _, one := range []struct {
		of   map[string]json.RawMessage
		into *[]*piece
	}{{m.definitions, &more.definitions}, {m.paths, &more.paths}, {m.parameters, &more.parameters}} {
		p, err := s.members(one.of)
		if err != nil {
			return err
		}
		if p != nil {
			*one.into = []*piece{p}
		}
	}
	if f.proto {
		if more, err = s.sectionsInProto(&more, f.v3); err != nil {
			return err
		}
	}
	x.definitions, x.paths = append(x.definitions, more.definitions...), append(x.paths, more.paths...)
	x.parameters = append(x.parameters, more.parameters...)
	return nil
}

// ours looks up the definitions and paths of this server's v2 document.
type ours interface {
	definition(name string) (json.RawMessage, error) // nil if the definition does not exist
	path(root, path string) (bool, error)
}

// said implements ours with this server's topics. It unpacks a piece only when one of its
// definitions or paths is looked up.
type said struct {
	spec   *Spec
	topics []topic
	types  *piece                     // definitions of Go types
	shared map[string]json.RawMessage // the unpacked types, nil before the first lookup
	paths  map[string]map[string]json.RawMessage
}

func (h *said) definition(name string) (json.RawMessage, error) {
	if h.shared == nil && h.types != nil {
		var err error
		if h.shared, err = h.types.members(); err != nil {
			return nil, err
		}
	}
	if raw := h.shared[name]; raw != nil {
		return raw, nil
	}
	for _, x := range h.topics {
		k := x.kind
		if k == nil || k.Model == nil || name != customName(k) && name != customName(k)+"List" {
			continue
		}
		d, err := h.spec.describe(x, form{})
		if err != nil || d.definitions == nil {
			return nil, err
		}
		defs, err := d.definitions.members()
		return defs[name], err
	}
	return nil, nil
}

func (h *said) path(where, path string) (bool, error) {
	if h.paths[where] == nil {
		all := map[string]json.RawMessage{}
		for _, x := range h.topics {
			if x.root() != where {
				continue
			}
			d, err := h.spec.describe(x, form{})
			if err != nil {
				return false, err
			}
			if d.paths == nil {
				continue
			}
			some, err := d.paths.members()
			if err != nil {
				return false, err
			}
			maps.Copy(all, some)
		}
		if h.paths == nil {
			h.paths = map[string]map[string]json.RawMessage{}
		}
		h.paths[where] = all
	}
	return h.paths[where][path] != nil, nil
}

// merger collects the paths, definitions and parameters that parts add to this server's v2
// document.
type merger struct {
	here                           ours
	paths, definitions, parameters map[string]json.RawMessage
}

func newMerger(here ours) *merger {
	return &merger{here, map[string]json.RawMessage{}, map[string]json.RawMessage{}, map[string]json.RawMessage{}}
}

// definition returns a definition of this server or of an earlier part by its name; nil if it does
// not exist.
func (m *merger) definition(name string) (json.RawMessage, error) {
	if raw := m.definitions[name]; raw != nil {
		return raw, nil
	}
	return m.here.definition(name)
}

// maxRenamings limits how often a part is merged again because the new name of a renamed definition
// is also in use.
const maxRenamings = 4

// add adds a part completely or not at all. Equal definitions of the same name are shared; others
// are renamed.
func (m *merger) add(p *Part) (err error) {
	defer func() {
		if r := recover(); r != nil { // the libraries do not validate their input
			err = fmt.Errorf("merging an OpenAPI document: %v", r)
		}
	}()
	var taken []string
	for range maxRenamings {
		added, err := m.combine(p, taken)
		if err != nil {
			return err
		}
		var more []string
		for name := range added.Definitions {
			raw, err := m.definition(name)
			if err != nil {
				return err
			}
			if raw != nil {
				more = append(more, name)
			}
		}
		if len(more) == 0 {
			return m.take(p, added)
		}
		taken = append(taken, more...)
	}
	return errors.New("merging an OpenAPI document: too many names of its definitions are taken")
}

// combine returns the paths, definitions and parameters that a part adds. Definitions are renamed
// if their name is in use for a different definition. taken are further names in use.
func (m *merger) combine(p *Part, taken []string) (*spec.Swagger, error) {
	var part spec.Swagger
	if err := json.Unmarshal(p.data, &part); err != nil {
		return nil, err
	}
	here := &spec.Swagger{SwaggerProps: spec.SwaggerProps{
		Paths: &spec.Paths{Paths: map[string]spec.PathItem{}}, Definitions: spec.Definitions{}, Parameters: map[string]spec.Parameter{},
	}}
	for _, name := range slices.AppendSeq(slices.Clone(taken), maps.Keys(part.Definitions)) {
		raw, err := m.definition(name)
		if err != nil {
			return nil, err
		}
		if raw == nil {
			continue
		}
		var d spec.Schema
		if err := json.Unmarshal(raw, &d); err != nil {
			return nil, err
		}
		here.Definitions[name] = d
	}
	known := slices.Collect(maps.Keys(here.Definitions))
	parameters := maps.Clone(m.parameters)
	maps.Copy(parameters, sharedParameters())
	for name, raw := range parameters {
		var d spec.Parameter
		if err := json.Unmarshal(raw, &d); err != nil {
			return nil, err
		}
		here.Parameters[name] = d
	}
	if err := aggregator.MergeSpecsIgnorePathConflictRenamingDefinitionsAndParameters(here, &part); err != nil {
		return nil, err
	}
	for _, name := range known { // existing definitions are not part of the result
		delete(here.Definitions, name)
	}
	for name := range sharedParameters() {
		delete(here.Parameters, name)
	}
	return here, nil
}

// take stores the additions of a part. Paths that already exist are left out.
func (m *merger) take(p *Part, added *spec.Swagger) error {
	for path := range added.Paths.Paths {
		is, err := m.here.path(p.root, path)
		if err != nil {
			return err
		}
		if is || m.paths[path] != nil {
			delete(added.Paths.Paths, path)
		}
	}
	paths, err1 := encoded(added.Paths.Paths)
	definitions, err2 := encoded(added.Definitions)
	parameters, err3 := encoded(added.Parameters)
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	maps.Copy(m.paths, paths)
	maps.Copy(m.definitions, definitions)
	maps.Copy(m.parameters, parameters)
	return nil
}

func encoded[T any](m map[string]T) (map[string]json.RawMessage, error) {
	out := make(map[string]json.RawMessage, len(m))
	for k, v := range m {
		raw, err := json.Marshal(v)
		if err != nil {
			return nil, err
		}
		out[k] = raw
	}
	return out, nil
}
