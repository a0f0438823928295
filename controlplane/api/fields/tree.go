package fields

import (
	"maps"
	"reflect"
	"slices"
	"strings"
)

// Leaf is a field, or a subtree of fields that is treated as a whole, with its answer: how it is
// treated.
type Leaf struct {
	// Path is the path of the field as users write it: "spec.containers[].image",
	// "metadata.annotations[a/b]".
	Path string
	// At is the path that has the answer: Path itself, or the root of a subtree with one answer.
	At string
	// Answer is nil for a field without an answer.
	Answer *Answer
	// Type is the Go type of the field.
	Type reflect.Type
	// Owner is the struct type that has the field, and Field the Go name of the field.
	Owner reflect.Type
	Field string
}

// Answers state for one Go type how each of its fields is treated.
type Answers struct {
	table  *Table
	typ    reflect.Type
	tree   *node // the fields that are refused or warned of; nil if none exist
	drops  *node // the dropped fields; nil if none exist
	stored *Answer
}

// Stored returns the answer for a kind that is stored and returned but has no effect yet; nil for
// all other kinds.
func (a *Answers) Stored() *Answer {
	if a == nil {
		return nil
	}
	return a.stored
}

// Leaves returns every field of the type with its answer, in the order of the Go type. The list is
// computed on each call: the API server does not need it, and the lists of all types with pod
// templates take a megabyte.
func (a *Answers) Leaves() []Leaf {
	a.table.mu.Lock()
	defer a.table.mu.Unlock()
	c := &compiler{table: a.table}
	c.visit(a.typ, c.begin(a.typ))
	return c.leaves
}

// node is a place in a type at or below which there are rules to check.
type node struct {
	rules []*Answer // rules about the value at this place
	// rules about keys of the map at this place; a "*" at the end matches any suffix
	keys  map[string]*Answer
	edges []edge // fields of the struct at this place
	dict  bool   // the value is a map, and the edges are fields of its members
}

type edge struct {
	index int
	name  string // "" for an embedded struct
	to    *node
}

func (n *node) empty() bool {
	return n == nil || len(n.rules) == 0 && len(n.keys) == 0 && len(n.edges) == 0
}

// split returns the tree below n with either only the rules about dropped fields, or only the other
// rules, or nil.
func (n *node) split(dropped bool) *node {
	out := &node{dict: n.dict}
	for _, a := range n.rules {
		if (a.State == Dropped) == dropped {
			out.rules = append(out.rules, a)
		}
	}
	if !dropped {
		out.keys = n.keys
	}
	for _, e := range n.edges {
		if to := e.to.split(dropped); to != nil {
			out.edges = append(out.edges, edge{e.index, e.name, to})
		}
	}
	if out.empty() {
		return nil
	}
	return out
}

// For returns the answers of the type of a value, or of a (possibly nil) pointer to the type.
// Fields without an answer are accepted.
func (t *Table) For(of any) *Answers {
	typ := reflect.TypeOf(of)
	for typ.Kind() == reflect.Pointer {
		typ = typ.Elem()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if a := t.compiled[typ]; a != nil {
		return a
	}
	c := &compiler{table: t}
	n := c.visit(typ, c.begin(typ))
	a := &Answers{table: t, typ: typ, stored: c.stored, tree: n.split(false), drops: n.split(true)}
	t.compiled[typ] = a
	return a
}

// compiler walks a type and collects its leaves.
type compiler struct {
	table  *Table
	leaves []Leaf
	stored *Answer
}

// begin returns the place at which a walk of t starts. In a kind that is stored as a whole, all
// fields inherit the answer Stored.
func (c *compiler) begin(t reflect.Type) place {
	for _, a := range c.table.types[typeName(t)]["."] {
		a.used = true
		c.stored = a
	}
	return place{inherited: c.stored, from: "."}
}

// place is the current position of a walk within a type.
type place struct {
	path      string
	inherited *Answer
	from      string         // path of the inherited answer
	depth     int            // index of the scope that has the inherited answer
	scopes    []scope        // outermost first
	within    []reflect.Type // enclosing structs, outermost first
	field     string         // Go name in the innermost of these structs
}

// leaf returns the leaf at a place; within has at least the root type of the walk.
func (p *place) leaf(path, at string, a *Answer, t reflect.Type) Leaf {
	l := Leaf{Path: path, At: at, Answer: a, Type: t, Field: p.field}
	if len(p.within) > 0 {
		l.Owner = p.within[len(p.within)-1]
	}
	return l
}

// scope is an enclosing type that has answers for its fields, with the path from that type to the
// current place.
type scope struct {
	answers map[string][]*Answer
	path    string
}

// at returns the answers for exactly this place and the index of their scope. The outermost scope
// has precedence, because it describes the field in its context.
func (p *place) at() ([]*Answer, int) {
	for i, s := range p.scopes {
		if found := s.answers[s.path]; len(found) > 0 && s.path != "" {
			for _, a := range found {
				a.used = true
			}
			return found, i
		}
	}
	return nil, 0
}

// withinStored reports whether an inner scope calls a place honoured that an outer scope calls
// stored.
func (p *place) withinStored(a *Answer, scope int) bool {
	return a.State == Honoured && p.inherited != nil && p.inherited.State == Stored && scope > p.depth
}

// visit records the fields at and below a place with their answers, and returns the rules to check
// there.
func (c *compiler) visit(t reflect.Type, p place) *node {
	n := &node{}
	found, depth := p.at()
	for _, a := range found {
		if a.Values == nil && !p.withinStored(a, depth) {
			p.inherited, p.from, p.depth = a, p.path, depth
		}
		if a.State == Refused || a.State == Dropped || a.Warn {
			n.rules = append(n.rules, a)
		}
		if a.Values != nil {
			path := p.path + "=" + strings.Join(a.Values, "|")
			c.leaves = append(c.leaves, p.leaf(path, path, a, t))
			if p.inherited == nil {
				p.inherited, p.from = &Answer{State: Honoured}, p.path
			}
		}
	}
	c.keys(t, &p, n)
	elem, suffix := t, ""
	for {
		switch elem.Kind() {
		case reflect.Pointer:
			elem = elem.Elem()
			continue
		case reflect.Slice, reflect.Map:
			if !opaque(elem) {
				n.dict = n.dict || elem.Kind() == reflect.Map
				elem, suffix = elem.Elem(), "[]"
				continue
			}
		}
		break
	}
	whole := p.inherited != nil && (p.inherited.State == Refused || p.inherited.State == Dropped)
	if opaque(elem) || whole || slices.Contains(p.within, elem) {
		c.leaves = append(c.leaves, p.leaf(p.path, p.from, p.inherited, t))
		return n
	}
	p.path += suffix
	c.fields(elem, p, n)
	return n
}

// keys adds the leaves and rules for single keys of a map.
func (c *compiler) keys(t reflect.Type, p *place, n *node) {
	if t.Kind() != reflect.Map {
		return
	}
	for _, s := range p.scopes {
		for _, path := range slices.Sorted(maps.Keys(s.answers)) {
			key, ok := strings.CutPrefix(path, s.path+"[")
			if !ok || s.path == "" {
				continue
			}
			key = strings.TrimSuffix(key, "]")
			a := s.answers[path][0]
			a.used = true
			if n.keys == nil {
				n.keys = map[string]*Answer{}
			}
			if a.State == Refused || a.Warn {
				n.keys[key] = a
			}
			at := p.path + "[" + key + "]"
			if a.Values != nil {
				at += "=" + strings.Join(a.Values, "|")
			}
			c.leaves = append(c.leaves, p.leaf(at, at, a, t))
		}
	}
}

func (c *compiler) fields(t reflect.Type, p place, n *node) {
	// A type within an inert field is inert whatever its own answers, except for its dropped
	// fields. Otherwise the answers of the type apply to all of its fields. Within a stored field
	// only its refused and inert fields keep their answers.
	answers := c.table.types[typeName(t)]
	switch inert := p.inherited != nil && p.inherited.State == Inert; {
	case answers == nil:
	case inert:
		p.scopes = append(slices.Clip(p.scopes), scope{answers: onlyDropped(answers)})
	default:
		if p.inherited != nil && (p.inherited.State == Honoured || c.ofEveryKind(t, p)) {
			p.inherited = nil
		}
		p.scopes = append(slices.Clip(p.scopes), scope{answers: answers})
	}
	p.within = append(slices.Clip(p.within), t)
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if !f.IsExported() || name == "-" {
			continue
		}
		next := p
		next.field = f.Name
		if name != "" {
			next.path = join(p.path, name)
			next.scopes = make([]scope, len(p.scopes))
			for i, s := range p.scopes {
				next.scopes[i] = scope{s.answers, join(s.path, name)}
			}
		} else if !f.Anonymous {
			name = f.Name
		}
		if to := c.visitField(f.Type, next, name); !to.empty() {
			n.edges = append(n.edges, edge{i, name, to})
		}
	}
}

// onlyDropped returns the answers for dropped fields.
func onlyDropped(answers map[string][]*Answer) map[string][]*Answer {
	out := map[string][]*Answer{}
	for path, list := range answers {
		if list[0].State == Dropped {
			out[path] = list
		}
	}
	return out
}

// ofEveryKind reports whether a type is the TypeMeta or ObjectMeta of the walk's root type. These
// fields are honoured in a stored kind too.
func (c *compiler) ofEveryKind(t reflect.Type, p place) bool {
	name := typeName(t)
	return c.stored == p.inherited && len(p.within) == 1 && (name == "meta/v1.TypeMeta" || name == "meta/v1.ObjectMeta")
}

// visitField calls visit, or visits the fields directly for an embedded struct, which has no name.
func (c *compiler) visitField(t reflect.Type, p place, name string) *node {
	if name != "" {
		return c.visit(t, p)
	}
	n := &node{}
	c.fields(t, p, n)
	return n
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// opaque reports whether a type is a single value for users, although it may be a Go struct.
func opaque(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Pointer:
		return false
	case reflect.Slice, reflect.Map:
		e := t.Elem()
		for e.Kind() == reflect.Pointer {
			e = e.Elem()
		}
		return e.Kind() == reflect.Uint8 || opaque(e)
	case reflect.Struct:
		switch t.Name() {
		case "Time", "MicroTime", "Duration", "Quantity", "IntOrString", "FieldsV1", "RawExtension":
			return strings.HasPrefix(t.PkgPath(), "k8s.io/apimachinery/")
		case "JSON", "JSONSchemaPropsOrArray", "JSONSchemaPropsOrBool", "JSONSchemaPropsOrStringArray":
			return strings.HasPrefix(t.PkgPath(), "k8s.io/apiextensions-apiserver/")
		}
		return false
	}
	return true
}
