// Package decodelimits limits the decoded size of a client's request body before it is decoded.
// Three bytes of JSON may become a struct of a kilobyte, and a YAML alias any number of values.
package decodelimits

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	yamlnode "go.yaml.in/yaml/v3"
	"sigs.k8s.io/yaml"
)

// The limits of one request body. Kubernetes limits only the bytes of a request: 3 MiB, of which
// 1.5 MiB can be stored. These limits are higher than normal objects of that size need. They bound
// the memory and time for a body that is constructed to grow when decoded.
const (
	MaxValues = 1 << 18 // members, items and scalars together: a value takes 6 bytes of 1.5 MiB
	MaxDepth  = 1000    // nesting depth of lists and objects
	// MaxMemory limits the estimated memory of the decoded body. See Counts.Memory.
	MaxMemory = 48 << 20
	// maxWork limits the sum of the squares of the sizes of all objects and lists; lists of scalars
	// count a quarter. The reason is that the sets of field owners are sorted by insertion. It
	// permits one object of 16,384 members, one list of as many objects, or one list of 32,768
	// scalars.
	maxWork = 1 << 28
	// maxNodes limits the nodes of parsed YAML; separators within block scalars count too.
	maxNodes = 1 << 18
	// MaxBytes limits the expanded size of YAML aliases, and the size of converted JSON.
	MaxBytes = 3 << 20
)

// ErrTooMuch is wrapped by every error for a body beyond the limits.
var ErrTooMuch = errors.New("the text holds too much")

// CheckJSON returns an error for a JSON text beyond the limits. It does not check the syntax. into
// is a value of the Go type into which the text will be decoded; nil means maps, lists and scalars.
func CheckJSON(data []byte, into any) error {
	if err := Count(data).Check(into); err != nil {
		return err
	}
	return CheckQuantities(data, into)
}

// Counts are upper estimates of the contents of a JSON text, a CBOR item or a protobuf message.
type Counts struct {
	Values  int // members, items and scalars
	Items   int // items of all lists
	Objects int
	work    int // sum of the squared sizes of objects and lists
	widest  int // members of the largest object or items of the largest list
	deep    bool

	quantity int  // length of the longest quantity of a protobuf message, in bytes
	exponent bool // a quantity of a protobuf message has an exponent beyond the limit
}

// close counts a finished object or list of n values; ofScalars reports whether it is a list of
// scalars only.
func (c *Counts) close(n int, ofScalars bool) {
	c.widest = max(c.widest, n)
	if ofScalars {
		n /= 2
	}
	c.work += n * n
}

// Check returns an error if the text is nested deeper than MaxDepth, has more than MaxValues
// values, or exceeds maxWork. It also returns an error if decoding into the Go type of into would
// take more than MaxMemory.
func (c Counts) Check(into any) error {
	switch {
	case c.deep:
		return TooDeep()
	case c.Values > MaxValues:
		return fmt.Errorf("%w: about %d values, at most %d are read", ErrTooMuch, c.Values, MaxValues)
	}
	if c.work > maxWork {
		return fmt.Errorf("%w: an object or list of about %d values, at most %d are read, or %d scalars in a list",
			ErrTooMuch, c.widest, 1<<14, 1<<15)
	}
	if m := c.Memory(into); m > MaxMemory {
		return fmt.Errorf("%w: its %d objects and %d list items would take about %d MiB of memory, at most %d MiB are used",
			ErrTooMuch, c.Objects, c.Items, m>>20, MaxMemory>>20)
	}
	return nil
}

// Deep reports whether lists and objects are nested deeper than MaxDepth.
func (c Counts) Deep() bool { return c.deep }

// TooDeep returns the error for a text that is nested deeper than MaxDepth.
func TooDeep() error {
	return fmt.Errorf("%w: lists and objects are nested more than %d deep", ErrTooMuch, MaxDepth)
}

// Count counts the contents of a JSON text. It stops where the text is nested too deep.
func Count(data []byte) Counts {
	var list [MaxDepth + 1]bool // for each open level: whether it is a list
	var size [MaxDepth + 1]int
	// for each open level: whether it is a list without nested lists and objects
	var scalars [MaxDepth + 1]bool
	depth, c := 0, Counts{Values: 1}
	for i := 0; i < len(data); i++ {
		switch data[i] {
		case '"':
			i = endOfString(data, i)
		case '{', '[':
			if depth++; depth > MaxDepth {
				c.deep = true
				return c
			}
			list[depth], size[depth] = data[i] == '[', 1
			scalars[depth], scalars[depth-1] = list[depth], false
			c.Values++
			if list[depth] {
				c.Items++
			} else {
				c.Objects++
			}
		case '}', ']':
			c.close(size[depth], scalars[depth])
			depth = max(depth-1, 0)
		case ',':
			c.Values++
			size[depth]++
			if list[depth] {
				c.Items++
			}
		}
	}
	for ; depth > 0; depth-- {
		c.close(size[depth], scalars[depth])
	}
	return c
}

// endOfString returns the index of the closing quote of the string that starts at i.
func endOfString(data []byte, i int) int {
	for i++; i < len(data); i++ {
		switch data[i] {
		case '\\':
			i++
		case '"':
			return i
		}
	}
	return i
}

// FromYAML converts YAML, which includes JSON, to JSON within the limits.
func FromYAML(data []byte) ([]byte, error) {
	if json.Valid(data) { // a YAML parser needs a multiple of the time and memory
		return data, CheckJSON(data, nil)
	}
	out, _, err := fromYAML(data, false)
	return out, err
}

// FromYAMLStrict is FromYAML that also returns an error for duplicate keys, in duplicates.
func FromYAMLStrict(data []byte) (out []byte, duplicates, err error) { return fromYAML(data, true) }

func fromYAML(data []byte, strict bool) (out []byte, duplicates, err error) {
	if err := checkYAML(data); err != nil {
		return nil, nil, err
	}
	if strict {
		if out, duplicates = yaml.YAMLToJSONStrict(data); duplicates == nil {
			return out, nil, CheckJSON(out, nil)
		}
	}
	if out, err = yaml.YAMLToJSON(data); err != nil {
		return nil, nil, err
	}
	return out, duplicates, CheckJSON(out, nil)
}

// checkYAML limits the number of nodes of the parsed text and the expanded size of its aliases.
func checkYAML(data []byte) error {
	if json.Valid(data) {
		return CheckJSON(data, nil) // which recognizes strings
	}
	if trimmed := bytes.TrimSpace(data); len(trimmed) > 0 && (trimmed[0] == '{' || trimmed[0] == '[') && Count(trimmed).Deep() {
		return TooDeep()
	}
	// Every node needs one of these characters, or the node before it does. Characters within
	// scalars count too, because recognizing scalars needs a parser.
	nodes := 1
	for i, c := range data {
		switch c {
		case '\n', '\r', ',', '[', '{':
			nodes++
		case ':', '-', '?': // indicators only before a space; after a quoted key a comma or brace counts
			if i+1 == len(data) || data[i+1] == ' ' || data[i+1] == '\t' {
				nodes++
			}
		}
	}
	if nodes > maxNodes {
		return fmt.Errorf("%w: YAML with about %d separators, at most %d are read; sent as JSON it may pass", ErrTooMuch, nodes, maxNodes)
	}
	if err := checkSingle(data); err != nil {
		return err
	}
	if !bytes.ContainsRune(data, '*') || !bytes.ContainsRune(data, '&') {
		return nil
	}
	var doc yamlnode.Node
	if err := yamlnode.Unmarshal(data, &doc); err != nil {
		return fmt.Errorf("yaml: %w", err)
	}
	e := expansion{sizes: map[*yamlnode.Node]size{}}
	return e.check(e.of(&doc))
}

// checkSingle returns an error for a text of several documents. A parser would read only the first
// of them.
func checkSingle(data []byte) error {
	if !bytes.Contains(data, []byte("\n---")) && !bytes.Contains(data, []byte("\n...")) {
		return nil
	}
	d := yamlnode.NewDecoder(bytes.NewReader(data))
	for documents := 0; ; {
		var doc yamlnode.Node
		err := d.Decode(&doc)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("yaml: %w", err)
		}
		if empty(&doc) {
			continue
		}
		if documents++; documents > 1 {
			return errSeveral
		}
	}
}

var errSeveral = errors.New("yaml: the text holds several documents: send each in a request of its own")

// empty reports whether a document has no content, such as the one after a final "---".
func empty(doc *yamlnode.Node) bool {
	return len(doc.Content) == 0 || len(doc.Content) == 1 && doc.Content[0].Tag == "!!null"
}

// size is the size of a node with every alias expanded.
type size struct{ values, bytes int }

// expansion computes the sizes of nodes, each once. A cycle of aliases is an error.
type expansion struct {
	sizes map[*yamlnode.Node]size
	over  error
}

func (e *expansion) check(s size) error {
	switch {
	case e.over != nil:
		return e.over
	case s.values > MaxValues:
		return fmt.Errorf("%w: its aliases stand for about %d values, at most %d are read", ErrTooMuch, s.values, MaxValues)
	case s.bytes > MaxBytes:
		return fmt.Errorf("%w: its aliases stand for about %d bytes, at most %d are read", ErrTooMuch, s.bytes, MaxBytes)
	}
	return nil
}

func (e *expansion) of(n *yamlnode.Node) size {
	if n == nil || e.over != nil {
		return size{}
	}
	if n.Kind == yamlnode.AliasNode {
		n = n.Alias
	}
	if s, ok := e.sizes[n]; ok {
		if s.values == 0 {
			e.over = fmt.Errorf("%w: an alias stands for what it is in", ErrTooMuch)
		}
		return s
	}
	e.sizes[n] = size{} // marks the node as in progress, to detect cycles
	s := size{1, len(n.Value) + 4}
	for _, c := range n.Content {
		in := e.of(c)
		s.values, s.bytes = s.values+in.values, s.bytes+in.bytes
		if e.over = e.check(s); e.over != nil {
			break
		}
	}
	e.sizes[n] = s
	return s
}
