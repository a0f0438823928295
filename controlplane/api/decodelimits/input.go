// Package decodelimits limits the decoded size of a client's request body before the body is
// decoded. Three bytes of JSON may become a struct of a kilobyte, and a YAML alias any number of
// values.
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
// 1.5 MiB can be stored. No normal object of that size reaches these limits. They bound the memory
// and time for a body that is constructed to become large when it is decoded.
const (
	MaxValues = 1 << 18 // members, items and scalars together: a value takes 6 bytes of 1.5 MiB
	MaxDepth  = 1000    // nesting depth of lists and objects
	// MaxMemory limits the estimated memory of the decoded body, in bytes. See
	// Counts.EstimateMemory.
	MaxMemory = 48 << 20
	// maxWork limits the sum of the squares of the sizes of all objects and lists; lists of scalars
	// count a quarter. The reason is that the sets of owned fields are sorted by insertion. It
	// permits one object of 16,384 members, one list of as many objects, or one list of 32,768
	// scalars.
	maxWork = 1 << 28
	// maxNodes is the maximum number of nodes of parsed YAML. Separators within block scalars count
	// too.
	maxNodes = 1 << 18
	// MaxBytes is the maximum size of YAML with all aliases expanded, and of converted JSON.
	MaxBytes = 3 << 20
)

// ErrTooMuch is wrapped by every error for a body that exceeds the limits.
var ErrTooMuch = errors.New("the text exceeds a decoding limit")

// CheckJSON returns an error for a JSON text that exceeds the limits. It does not check the syntax.
// target is a value of the Go type into which the text will be decoded. nil means maps, lists and
// scalars.
func CheckJSON(data []byte, target any) error {
	if err := CountJSON(data).CheckLimits(target); err != nil {
		return err
	}
	return CheckQuantities(data, target)
}

// Counts are upper estimates of the numbers and sizes in a JSON text, a CBOR item or a protobuf
// message.
type Counts struct {
	Values  int // members, items and scalars
	Items   int // items of all lists
	Objects int
	work    int // sum of the squared sizes of objects and lists
	widest  int // members of the largest object or items of the largest list
	deep    bool

	quantity int  // length of the longest quantity of a protobuf message, in bytes
	exponent bool // some quantity of a protobuf message has an exponent that exceeds the limit
}

// endContainer adds a complete object or list of n values to the counts. ofScalars reports whether
// it is a list that contains only scalars.
func (c *Counts) endContainer(n int, ofScalars bool) {
	c.widest = max(c.widest, n)
	if ofScalars {
		n /= 2
	}
	c.work += n * n
}

// CheckLimits returns an error if the text is nested deeper than MaxDepth, has more than MaxValues
// values, or exceeds maxWork. It also returns an error if the text, decoded into the Go type of
// target, takes more than MaxMemory.
func (c Counts) CheckLimits(target any) error {
	switch {
	case c.deep:
		return ErrTooDeep()
	case c.Values > MaxValues:
		return fmt.Errorf("%w: about %d values, at most %d are read", ErrTooMuch, c.Values, MaxValues)
	}
	if c.work > maxWork {
		return fmt.Errorf("%w: an object or list of about %d values, at most %d are read, or %d scalars in a list",
			ErrTooMuch, c.widest, 1<<14, 1<<15)
	}
	if m := c.EstimateMemory(target); m > MaxMemory {
		return fmt.Errorf("%w: its %d objects and %d list items would take about %d MiB of memory, at "+
			"most %d MiB are used",
			ErrTooMuch, c.Objects, c.Items, m>>20, MaxMemory>>20)
	}
	return nil
}

// IsTooDeep reports whether lists and objects are nested deeper than MaxDepth.
func (c Counts) IsTooDeep() bool { return c.deep }

// ErrTooDeep returns the error for a text that is nested deeper than MaxDepth.
func ErrTooDeep() error {
	return fmt.Errorf("%w: lists and objects are nested more than %d deep", ErrTooMuch, MaxDepth)
}

// CountJSON returns the counts of a JSON text's contents. It stops if the text is nested deeper
// than MaxDepth.
func CountJSON(data []byte) Counts {
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
			c.endContainer(size[depth], scalars[depth])
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
		c.endContainer(size[depth], scalars[depth])
	}
	return c
}

// endOfString returns the index of the closing quote of the string that starts at index i.
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

// FromYAML converts YAML, which includes JSON, to JSON, within the limits of this package.
func FromYAML(data []byte) ([]byte, error) {
	if json.Valid(data) { // a YAML parser needs several times the time and memory
		return data, CheckJSON(data, nil)
	}
	out, _, err := fromYAML(data, false)
	return out, err
}

// FromYAMLStrict is like FromYAML, but also returns an error for duplicate keys, in duplicates.
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

// checkYAML returns an error if a YAML text has too many nodes, or if it is too large after all
// aliases are expanded.
func checkYAML(data []byte) error {
	if json.Valid(data) {
		return CheckJSON(data, nil) // CheckJSON recognizes strings
	}
	if trimmed := bytes.TrimSpace(data); len(trimmed) > 0 && (trimmed[0] == '{' || trimmed[0] == '[') &&
		CountJSON(trimmed).IsTooDeep() {
		return ErrTooDeep()
	}
	// Every node needs one of these characters, or the node before it does. Characters within
	// scalars count too, because recognizing scalars needs a parser.
	nodes := 1
	for i, c := range data {
		switch c {
		case '\n', '\r', ',', '[', '{':
			nodes++
		case ':', '-', '?': // indicators only before a space; a comma or brace counts after a quoted key
			if i+1 == len(data) || data[i+1] == ' ' || data[i+1] == '\t' {
				nodes++
			}
		}
	}
	if nodes > maxNodes {
		return fmt.Errorf("%w: YAML with about %d separators, at most %d are read; sent as JSON it may pass",
			ErrTooMuch, nodes, maxNodes)
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
	return e.checkSize(e.nodeSize(&doc))
}

// checkSingle returns an error for a text of several documents, because a parser would read only
// the first document.
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
		if isEmptyDocument(&doc) {
			continue
		}
		if documents++; documents > 1 {
			return errMultipleDocuments
		}
	}
}

var errMultipleDocuments = errors.New("yaml: the text contains several documents: send each document in a " +
	"separate request")

// isEmptyDocument reports whether a document has no content, such as the document after a final
// "---".
func isEmptyDocument(doc *yamlnode.Node) bool {
	return len(doc.Content) == 0 || len(doc.Content) == 1 && doc.Content[0].Tag == "!!null"
}

// size is the size of a YAML node with every alias in it expanded.
type size struct{ values, bytes int }

// expansion computes the sizes of YAML nodes with all aliases expanded, each node once. A cycle of
// aliases is an error.
type expansion struct {
	sizes map[*yamlnode.Node]size
	err   error
}

func (e *expansion) checkSize(s size) error {
	switch {
	case e.err != nil:
		return e.err
	case s.values > MaxValues:
		return fmt.Errorf("%w: its aliases expand to about %d values, at most %d are read", ErrTooMuch,
			s.values, MaxValues)
	case s.bytes > MaxBytes:
		return fmt.Errorf("%w: its aliases expand to about %d bytes, at most %d are read", ErrTooMuch,
			s.bytes, MaxBytes)
	}
	return nil
}

func (e *expansion) nodeSize(n *yamlnode.Node) size {
	if n == nil || e.err != nil {
		return size{}
	}
	if n.Kind == yamlnode.AliasNode {
		n = n.Alias
	}
	if s, ok := e.sizes[n]; ok {
		if s.values == 0 {
			e.err = fmt.Errorf("%w: an alias refers to a node that contains it", ErrTooMuch)
		}
		return s
	}
	e.sizes[n] = size{} // marks the node as in progress, to detect cycles
	s := size{1, len(n.Value) + 4}
	for _, c := range n.Content {
		in := e.nodeSize(c)
		s.values, s.bytes = s.values+in.values, s.bytes+in.bytes
		if e.err = e.checkSize(s); e.err != nil {
			break
		}
	}
	e.sizes[n] = s
	return s
}
