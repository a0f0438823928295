package fields

import (
	"maps"
	"reflect"
	"slices"
	"strings"
)

// Leaf is a field with its answer, or a subtree that is answered as one.
type Leaf struct {
	// Path names the field as users write it: "spec.containers[].image", "metadata.annotations[a/b]".
	Path string
	// At is where the answer stands: the path itself, or that of the subtree that is answered as one.
	At string
	// Answer is nil for a field that nobody has answered.
	Answer *Answer
	// Type is the field's.
	Type reflect.Type
	// Owner is the struct that has the field, and Field its name there.
	Owner reflect.Type
	Field string
}

// Answers are those of one type, ready to be asked.
type Answers struct {
	table  *Table
	typ    reflect.Type
	tree   *node // of the refused fields and those that clients are warned of; nil when every value is fine
	drops  *node // of the dropped fields; nil when none exist
	stored *Answer
}

// Stored is the answer for a kind that is stored and shown, and on which nothing acts yet; nil for all others.
func (a *Answers) Stored() *Answer {
	if a == nil {
		return nil
	}
	return a.stored
}

// Leaves lists every field of the type with its answer, in the order of the Go type.
// They are found anew each time: who serves the API needs none, and those of all templates of pods are a megabyte.
func (a *Answers) Leaves() []Leaf {
	a.table.mu.Lock()
	defer a.table.mu.Unlock()
	c := &compiler{table: a.table}
	c.visit(a.typ, c.begin(a.typ))
	return c.leaves
}

// node is a place in a type below which, or at which, something may be wrong.
type node struct {
	rules []*Answer          // about the value here
	keys  map[string]*Answer // about keys of the map here; a "*" at the end stands for any rest
	edges []edge             // fields of the struct here
	dict  bool               // the value is a map whose members have the edges
}

type edge struct {
	index int
	name  string // "" for a struct whose fields stand in its parent
	to    *node
}

func (n *node) empty() bool {
	return n == nil || len(n.rules) == 0 && len(n.keys) == 0 && len(n.edges) == 0
}

// split returns the part of the tree below n that has only rules about dropped fields, or only the other rules.
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

// For returns the answers of the type of a value or of a (possibly nil) pointer to it. Fields that nobody has
// answered are leaves without an answer, and accepted.
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

// compiler walks a type.
type compiler struct {
	table  *Table
	leaves []Leaf
	stored *Answer
}

// begin is the place at which a walk begins: of a kind that is stored as a whole, everything is stored.
func (c *compiler) begin(t reflect.Type) place {
	for _, a := range c.table.types[typeName(t)]["."] {
		a.used = true
		c.stored = a
	}
	return place{inherited: c.stored, from: "."}
}

// place is where in a type the walk stands.
type place struct {
	path      string
	inherited *Answer
	from      string         // where it stands
	depth     int            // the scope of what said so
	scopes    []scope        // from the outermost
	within    []reflect.Type // the structs around
	field     string         // the name in the innermost of them
}

// leaf is the leaf at a place; within holds at least the type that the walk began with.
func (p *place) leaf(path, at string, a *Answer, t reflect.Type) Leaf {
	l := Leaf{Path: path, At: at, Answer: a, Type: t, Field: p.field}
	if len(p.within) > 0 {
		l.Owner = p.within[len(p.within)-1]
	}
	return l
}

// scope is a type around the place that has answers, and the path from there.
type scope struct {
	answers map[string][]*Answer
	path    string
}

// at are the answers about exactly this place, and of which scope. Who is further out knows more about what it is for.
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

// withinStored says that what a scope calls honoured is within what one around it calls stored.
func (p *place) withinStored(a *Answer, scope int) bool {
	return a.State == Honoured && p.inherited != nil && p.inherited.State == Stored && scope > p.depth
}

// visit answers for one place and returns what is to be checked there.
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

// keys finds the answers about single keys of a map.
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
	// What a type around says to be inert is so, whatever it is elsewhere, except that dropped fields are dropped.
	// Otherwise a type that has answers answers for each of its fields; what is stored refuses what it refuses.
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

// onlyDropped returns the answers about dropped fields.
func onlyDropped(answers map[string][]*Answer) map[string][]*Answer {
	out := map[string][]*Answer{}
	for path, list := range answers {
		if list[0].State == Dropped {
			out[path] = list
		}
	}
	return out
}

// ofEveryKind says that a type is at the top of a kind what all kinds have, which is honoured in a stored kind too.
func (c *compiler) ofEveryKind(t reflect.Type, p place) bool {
	name := typeName(t)
	return c.stored == p.inherited && len(p.within) == 1 && (name == "meta/v1.TypeMeta" || name == "meta/v1.ObjectMeta")
}

// visitField is visit, or for a struct without a name of its own its fields.
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

// opaque says that a type is a value to users and has no fields.
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
