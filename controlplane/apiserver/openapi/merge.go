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

// Part contains the paths and definitions of one group version from the OpenAPI v2 document of
// another API server. NewPart validates it.
type Part struct {
	root string // document path of the group version: "apis/apps/v1"
	data []byte // JSON
	sum  [sha256.Size]byte
}

// gvkExtension is the extension of a definition that lists the kinds (group, version, kind) with
// the definition as their schema.
const gvkExtension = "x-kubernetes-group-version-kind"

// NewPart returns the part of another API server's v2 document that belongs to the group version
// gv. The part has the paths below gv and the definitions that they use. Definitions keep only
// kinds of gv in gvkExtension. The server may be malicious, so the document must be valid both in
// JSON and in protobuf.
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
		return nil, fmt.Errorf("the OpenAPI document of %s is invalid: %w", gv, err)
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
		s.dropDocument(mergedV2)
		s.dropDocument(mergedV2 + ".pb")
	}
	s.mu.Unlock()
	s.serveDocument(w, r, mergedV2, protoV2)
}

// mergedV2 is the internal name of the v2 document that includes the parts of other API servers.
const mergedV2 = "v2+"

func keyOf(parts []*Part) string {
	sum := sha256.New()
	for _, p := range parts {
		_, _ = sum.Write(p.sum[:])
	}
	return string(sum.Sum(nil))
}

// mergeParts adds the parts of other API servers to merged, the sections of a v2 document, as new
// pieces. The existing pieces do not change.
func (s *Spec) mergeParts(merged *sections, topics []topic, parts []*Part, docForm form) error {
	here := &servedContent{spec: s, topics: topics}
	var err error
	if here.types, err = s.typesOf(topics); err != nil {
		return err
	}
	m := newMerger(here)
	for _, p := range parts {
		_ = m.addPart(p) // a part that cannot be merged is left out
	}
	defer s.reserveWork()()
	var more sections
	for _, one := range []struct {
		of   map[string]json.RawMessage
		into *[]*piece
	}{{m.definitions, &more.definitions}, {m.paths, &more.paths}, {m.parameters, &more.parameters}} {
		p, err := s.packMembers(one.of)
		if err != nil {
			return err
		}
		if p != nil {
			*one.into = []*piece{p}
		}
	}
	if docForm.proto {
		if more, err = s.sectionsInProto(&more, docForm.v3); err != nil {
			return err
		}
	}
	merged.definitions, merged.paths = append(merged.definitions, more.definitions...),
		append(merged.paths, more.paths...)
	merged.parameters = append(merged.parameters, more.parameters...)
	return nil
}

// existingContent looks up the definitions and paths of this server's v2 document.
type existingContent interface {
	findDefinition(name string) (json.RawMessage, error) // nil if the definition does not exist
	hasPath(root, path string) (bool, error)
}

// servedContent implements existingContent for this server's topics. It decompresses a piece only
// when one of its definitions or paths is looked up.
type servedContent struct {
	spec   *Spec
	topics []topic
	types  *piece                     // definitions of Go types
	shared map[string]json.RawMessage // the decompressed types; nil before the first lookup
	paths  map[string]map[string]json.RawMessage
}

func (h *servedContent) findDefinition(name string) (json.RawMessage, error) {
	if h.shared == nil && h.types != nil {
		var err error
		if h.shared, err = h.types.parseMembers(); err != nil {
			return nil, err
		}
	}
	if raw := h.shared[name]; raw != nil {
		return raw, nil
	}
	for _, x := range h.topics {
		k := x.kind
		if k == nil || k.Schema.Model == nil || name != customName(k) && name != customName(k)+"List" {
			continue
		}
		d, err := h.spec.describeTopic(x, form{})
		if err != nil || d.definitions == nil {
			return nil, err
		}
		defs, err := d.definitions.parseMembers()
		return defs[name], err
	}
	return nil, nil
}

func (h *servedContent) hasPath(root, path string) (bool, error) {
	if h.paths[root] == nil {
		all := map[string]json.RawMessage{}
		for _, x := range h.topics {
			if x.documentRoot() != root {
				continue
			}
			d, err := h.spec.describeTopic(x, form{})
			if err != nil {
				return false, err
			}
			if d.paths == nil {
				continue
			}
			some, err := d.paths.parseMembers()
			if err != nil {
				return false, err
			}
			maps.Copy(all, some)
		}
		if h.paths == nil {
			h.paths = map[string]map[string]json.RawMessage{}
		}
		h.paths[root] = all
	}
	return h.paths[root][path] != nil, nil
}

// merger collects the paths, definitions and parameters that parts add to this server's v2
// document.
type merger struct {
	existing                       existingContent
	paths, definitions, parameters map[string]json.RawMessage
}

func newMerger(existing existingContent) *merger {
	return &merger{existing, map[string]json.RawMessage{}, map[string]json.RawMessage{}, map[string]json.RawMessage{}}
}

// findDefinition returns a definition of this server or of an earlier part by its name; nil if it
// does not exist.
func (m *merger) findDefinition(name string) (json.RawMessage, error) {
	if raw := m.definitions[name]; raw != nil {
		return raw, nil
	}
	return m.existing.findDefinition(name)
}

// maxRenamings is how often a part is merged again at most, because the new name of a renamed
// definition is also in use.
const maxRenamings = 4

// addPart adds a part completely or not at all. Equal definitions of the same name are shared;
// others are renamed.
func (m *merger) addPart(part *Part) (err error) {
	defer func() {
		if r := recover(); r != nil { // the libraries do not validate their input
			err = fmt.Errorf("merging an OpenAPI document: %v", r)
		}
	}()
	var taken []string
	for range maxRenamings {
		added, err := m.combinePart(part, taken)
		if err != nil {
			return err
		}
		var more []string
		for name := range added.Definitions {
			raw, err := m.findDefinition(name)
			if err != nil {
				return err
			}
			if raw != nil {
				more = append(more, name)
			}
		}
		if len(more) == 0 {
			return m.storeAdditions(part, added)
		}
		taken = append(taken, more...)
	}
	return errors.New("merging an OpenAPI document: too many names of its definitions are taken")
}

// combinePart returns the paths, definitions and parameters that a part adds. A definition is
// renamed if its name is in use for a different definition. taken contains further names in use.
func (m *merger) combinePart(addition *Part, taken []string) (*spec.Swagger, error) {
	var part spec.Swagger
	if err := json.Unmarshal(addition.data, &part); err != nil {
		return nil, err
	}
	here := &spec.Swagger{SwaggerProps: spec.SwaggerProps{
		Paths: &spec.Paths{Paths: map[string]spec.PathItem{}}, Definitions: spec.Definitions{},
		Parameters: map[string]spec.Parameter{},
	}}
	for _, name := range slices.AppendSeq(slices.Clone(taken), maps.Keys(part.Definitions)) {
		raw, err := m.findDefinition(name)
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

// storeAdditions stores the additions of a part in m. Paths that already exist are left out.
func (m *merger) storeAdditions(part *Part, added *spec.Swagger) error {
	for path := range added.Paths.Paths {
		is, err := m.existing.hasPath(part.root, path)
		if err != nil {
			return err
		}
		if is || m.paths[path] != nil {
			delete(added.Paths.Paths, path)
		}
	}
	paths, err1 := encodeValues(added.Paths.Paths)
	definitions, err2 := encodeValues(added.Definitions)
	parameters, err3 := encodeValues(added.Parameters)
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	maps.Copy(m.paths, paths)
	maps.Copy(m.definitions, definitions)
	maps.Copy(m.parameters, parameters)
	return nil
}

func encodeValues[T any](m map[string]T) (map[string]json.RawMessage, error) {
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
