package fields

import (
	"maps"
	"reflect"
	"slices"
	"strings"
)

// Leaf is a field, or a field with all fields below it if they are treated alike, and its Answer:
// how the API server treats it.
type Leaf struct {
	// Path is the path of the field as users write it: "spec.containers[].image",
	// "metadata.annotations[a/b]".
	Path string
	// At is the path to which the Answer belongs: Path itself, or the path of a parent field from
	// which the field inherits the Answer.
	At string
	// Answer is nil if no treatment is defined for the field.
	Answer *Answer
	// Type is the Go type of the field.
	Type reflect.Type
	// Owner is the struct type that contains the field, and Field the Go name of the field.
	Owner reflect.Type
	Field string
}

// Answers states for one Go type how the API server treats each of its fields.
type Answers struct {
	table  *Table
	typ    reflect.Type
	tree   *node // rules for the fields that are refused or cause a warning; nil if the type has no such field
	drops  *node // rules for the dropped fields; nil if the type has no such field
	stored *Answer
}

// Stored returns the Answer of a kind with objects that are stored and returned but have no effect
// yet. It returns nil for all other kinds.
func (a *Answers) Stored() *Answer {
	if a == nil {
		return nil
	}
	return a.stored
}

// Leaves returns every field of the type with its Answer, in the order of the Go type. The list is
// computed on each call: the API server does not need it, and the lists of all types with pod
// templates take a megabyte.
func (a *Answers) Leaves() []Leaf {
	a.table.mu.Lock()
	defer a.table.mu.Unlock()
	c := &compiler{table: a.table}
	c.visitType(a.typ, c.rootPosition(a.typ))
	return c.leaves
}

// node is a field of a type, or the type itself, that has rules to check or contains fields with
// such rules. A rule is an Answer that rejects, drops or warns.
type node struct {
	rules []*Answer // rules about the value of the field
	// rules about keys of the map in the field; a "*" at the end matches any suffix
	keys  map[string]*Answer
	edges []edge // fields of the struct in the field
	dict  bool   // the value is a map, and the edges are fields of its members
}

type edge struct {
	index int
	name  string // "" for an embedded struct
	to    *node
}

func (n *node) isEmpty() bool {
	return n == nil || len(n.rules) == 0 && len(n.keys) == 0 && len(n.edges) == 0
}

// selectRules returns a copy of the tree below n with some of its rules. If forDropped is true, the
// copy has only the rules of fields with the State Dropped, otherwise only the other rules. It
// returns nil if no rules remain.
func (n *node) selectRules(forDropped bool) *node {
	out := &node{dict: n.dict}
	for _, a := range n.rules {
		if (a.State == Dropped) == forDropped {
			out.rules = append(out.rules, a)
		}
	}
	if !forDropped {
		out.keys = n.keys
	}
	for _, e := range n.edges {
		if to := e.to.selectRules(forDropped); to != nil {
			out.edges = append(out.edges, edge{e.index, e.name, to})
		}
	}
	if out.isEmpty() {
		return nil
	}
	return out
}

// AnswersFor returns the Answers for the type of a value. For a pointer, which may be nil, it
// returns the Answers for the type to which the pointer points. Fields that the Table does not list
// are accepted.
func (t *Table) AnswersFor(value any) *Answers {
	typ := reflect.TypeOf(value)
	for typ.Kind() == reflect.Pointer {
		typ = typ.Elem()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if a := t.compiled[typ]; a != nil {
		return a
	}
	c := &compiler{table: t}
	n := c.visitType(typ, c.rootPosition(typ))
	a := &Answers{table: t, typ: typ, stored: c.stored, tree: n.selectRules(false), drops: n.selectRules(true)}
	t.compiled[typ] = a
	return a
}

// compiler visits the fields of a Go type. It collects them as leaves with their answers, and
// builds the tree of the rules to check.
type compiler struct {
	table  *Table
	leaves []Leaf
	stored *Answer
}

// rootPosition returns the position at which the visit of the type t starts. If the Table lists t
// as stored as a whole, all its fields inherit that Answer.
func (c *compiler) rootPosition(t reflect.Type) position {
	for _, a := range c.table.types[typeName(t)]["."] {
		a.used = true
		c.stored = a
	}
	return position{inherited: c.stored, from: "."}
}

// position is the field that a compiler currently visits, with the enclosing types and the Answer
// that the field inherits from them.
type position struct {
	path      string
	inherited *Answer
	from      string         // path of the inherited answer
	depth     int            // index of the scope that has the inherited answer
	scopes    []scope        // outermost first
	within    []reflect.Type // enclosing structs, outermost first
	field     string         // Go name in the innermost of these structs
}

// newLeaf returns the Leaf for a field at the position p. p.within contains at least the type at
// which the visit started.
func (p *position) newLeaf(path, at string, answer *Answer, t reflect.Type) Leaf {
	l := Leaf{Path: path, At: at, Answer: answer, Type: t, Field: p.field}
	if len(p.within) > 0 {
		l.Owner = p.within[len(p.within)-1]
	}
	return l
}

// scope is an enclosing type of the current position that the Table lists, with the path from that
// type to the position. answers contains the answers of the type's fields by path.
type scope struct {
	answers map[string][]*Answer
	path    string
}

// ownAnswers returns the answers that the Table lists for exactly this position, and the index of
// the scope that lists them. The outermost scope has precedence, because it describes the field in
// its context.
func (p *position) ownAnswers() ([]*Answer, int) {
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

// isWithinStored reports whether the answer of an inner scope treats the position as honoured,
// although an outer scope treats it as stored.
func (p *position) isWithinStored(answer *Answer, scope int) bool {
	return answer.State == Honoured && p.inherited != nil && p.inherited.State == Stored && scope > p.depth
}

// visitType collects the fields at and below a position as leaves. t is the type of the position.
// It returns the tree of rules for these fields, or nil.
func (c *compiler) visitType(t reflect.Type, p position) *node {
	n := &node{}
	found, depth := p.ownAnswers()
	for _, a := range found {
		if a.Values == nil && !p.isWithinStored(a, depth) {
			p.inherited, p.from, p.depth = a, p.path, depth
		}
		if a.State == Refused || a.State == Dropped || a.Warn {
			n.rules = append(n.rules, a)
		}
		if a.Values != nil {
			path := p.path + "=" + strings.Join(a.Values, "|")
			c.leaves = append(c.leaves, p.newLeaf(path, path, a, t))
			if p.inherited == nil {
				p.inherited, p.from = &Answer{State: Honoured}, p.path
			}
		}
	}
	c.visitMapKeys(t, &p, n)
	elem, suffix := t, ""
	for {
		switch elem.Kind() {
		case reflect.Pointer:
			elem = elem.Elem()
			continue
		case reflect.Slice, reflect.Map:
			if !isOpaque(elem) {
				n.dict = n.dict || elem.Kind() == reflect.Map
				elem, suffix = elem.Elem(), "[]"
				continue
			}
		}
		break
	}
	whole := p.inherited != nil && (p.inherited.State == Refused || p.inherited.State == Dropped)
	if isOpaque(elem) || whole || slices.Contains(p.within, elem) {
		c.leaves = append(c.leaves, p.newLeaf(p.path, p.from, p.inherited, t))
		return n
	}
	p.path += suffix
	c.visitFields(elem, p, n)
	return n
}

// visitMapKeys collects leaves for those keys of a map that have their own answers, such as one
// annotation. It adds the rules of these answers to n.
func (c *compiler) visitMapKeys(t reflect.Type, p *position, n *node) {
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
			c.leaves = append(c.leaves, p.newLeaf(at, at, a, t))
		}
	}
}

func (c *compiler) visitFields(t reflect.Type, p position, n *node) {
	// The fields of a type within an inert field are inert, whatever the type's own answers, except
	// for its dropped fields. Otherwise the answers of the type apply to all of its fields. Within
	// a stored field only its refused and inert fields keep their answers.
	answers := c.table.types[typeName(t)]
	switch inert := p.inherited != nil && p.inherited.State == Inert; {
	case answers == nil:
	case inert:
		p.scopes = append(slices.Clip(p.scopes), scope{answers: onlyDropped(answers)})
	default:
		if p.inherited != nil && (p.inherited.State == Honoured || c.isKindMeta(t, p)) {
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
			next.path = joinPath(p.path, name)
			next.scopes = make([]scope, len(p.scopes))
			for i, s := range p.scopes {
				next.scopes[i] = scope{s.answers, joinPath(s.path, name)}
			}
		} else if !f.Anonymous {
			name = f.Name
		}
		if to := c.visitField(f.Type, next, name); !to.isEmpty() {
			n.edges = append(n.edges, edge{i, name, to})
		}
	}
}

// onlyDropped returns the answers for fields with the State Dropped.
func onlyDropped(answers map[string][]*Answer) map[string][]*Answer {
	out := map[string][]*Answer{}
	for path, list := range answers {
		if list[0].State == Dropped {
			out[path] = list
		}
	}
	return out
}

// isKindMeta reports whether a type is the TypeMeta or ObjectMeta of the type at which the visit
// started. These fields are honoured in a stored kind too.
func (c *compiler) isKindMeta(t reflect.Type, p position) bool {
	name := typeName(t)
	return c.stored == p.inherited && len(p.within) == 1 && (name == "meta/v1.TypeMeta" || name == "meta/v1.ObjectMeta")
}

// visitField calls visitType for a struct field. For an embedded struct, which has no name, it
// calls visitFields instead, so that the fields of that struct belong to the enclosing struct.
func (c *compiler) visitField(t reflect.Type, p position, name string) *node {
	if name != "" {
		return c.visitType(t, p)
	}
	n := &node{}
	c.visitFields(t, p, n)
	return n
}

func joinPath(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// isOpaque reports whether users regard a type as a single value, although it may be a Go struct.
func isOpaque(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Pointer:
		return false
	case reflect.Slice, reflect.Map:
		e := t.Elem()
		for e.Kind() == reflect.Pointer {
			e = e.Elem()
		}
		return e.Kind() == reflect.Uint8 || isOpaque(e)
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
