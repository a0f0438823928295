// Package jsonpatch applies JSON patches (RFC 6902) and merge patches (RFC 7386). It bounds the
// number of decoded values, the work, and the size of the result, which is computed before the
// result is built. For any patch, the memory is a small multiple of the document and the patch, and
// the time is below a second.
package jsonpatch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

const (
	// MaxOps is the largest number of operations in a JSON patch.
	MaxOps = 10000

	maxNodes  = 1 << 16
	maxWork   = 64 << 20
	maxDepth  = 1000
	cloneWork = 50 // cost of copying one value, in scanned bytes
	shiftWork = 2  // cost of moving one item of a list
)

// ErrMalformed means that the patch is invalid, and ErrTooLarge that the patch or its result
// exceeds a limit. Every other error means that the patch does not apply to the document.
var (
	ErrMalformed = errors.New("malformed patch")
	ErrTooLarge  = errors.New("patch exceeds a limit")
)

type operation struct {
	Op    string          `json:"op"`
	Path  *string         `json:"path"`
	From  *string         `json:"from"`
	Value json.RawMessage `json:"value"`
}

// Apply applies the operations of a JSON patch to doc, which must be valid JSON, and returns the
// result. The result may have at most maxBytes bytes, or as many as doc if doc is larger.
func Apply(ctx context.Context, doc, patch []byte, maxBytes int) ([]byte, error) {
	ops, err := parseOperations(patch)
	if err != nil {
		return nil, err
	}
	t := newTree(doc, maxBytes)
	for i := range ops {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("applying a JSON patch: %w", err)
		}
		if err := t.applyOperation(&ops[i]); err != nil {
			return nil, err
		}
	}
	return t.encode(), nil
}

func (t *tree) encode() []byte { return t.root.appendText(make([]byte, 0, t.bytes)) }

// parseOperations returns the operations of a JSON patch. It decodes them one by one and stops at
// MaxOps, so that an oversized patch is never decoded as a whole.
func parseOperations(patch []byte) ([]operation, error) {
	dec := json.NewDecoder(bytes.NewReader(patch))
	if open, err := dec.Token(); err != nil || open != json.Delim('[') {
		return nil, fmt.Errorf("%w: a JSON patch is a list of operations", ErrMalformed)
	}
	var ops []operation
	for dec.More() {
		if len(ops) == MaxOps {
			return nil, fmt.Errorf("%w: a JSON patch has at most %d operations", ErrTooLarge, MaxOps)
		}
		var op operation
		if err := dec.Decode(&op); err != nil {
			return nil, fmt.Errorf("%w: operation %d: %v", ErrMalformed, len(ops), err)
		}
		if op.Value == nil {
			op.Value = json.RawMessage("null")
		}
		ops = append(ops, op)
	}
	if _, err := dec.Token(); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrMalformed, err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, fmt.Errorf("%w: data after the list of operations", ErrMalformed)
	}
	return ops, nil
}

func (t *tree) applyOperation(op *operation) error {
	path, err := splitPointer(op.Op, "path", op.Path)
	if err != nil {
		return err
	}
	value := node{text: string(bytes.TrimSpace(op.Value))}
	switch op.Op {
	case "add":
		err = t.setValue(path, value, true)
	case "replace":
		err = t.setValue(path, value, false)
	case "remove":
		_, err = t.removeValue(path)
	case "test":
		err = t.testValue(path, value)
	case "copy", "move":
		err = t.copyOrMove(op, path)
	default:
		return fmt.Errorf("%q is not an operation of a JSON patch", op.Op)
	}
	switch {
	case err == nil || errors.Is(err, ErrTooLarge):
	case op.Op == "test":
		return fmt.Errorf("testing value %s failed: %w", *op.Path, err)
	default:
		return fmt.Errorf("%s operation does not apply: path %q: %w", op.Op, *op.Path, err)
	}
	return err
}

func (t *tree) copyOrMove(op *operation, path []string) error {
	from, err := splitPointer(op.Op, "from", op.From)
	if err != nil {
		return err
	}
	if op.Op == "copy" {
		source, err := t.valueAt(from)
		if err != nil {
			return fmt.Errorf("from %q: %w", *op.From, err)
		}
		return t.setValue(path, source, true)
	}
	if *op.Path == *op.From {
		_, err := t.valueAt(from)
		return err
	}
	if strings.HasPrefix(*op.Path, *op.From+"/") {
		return fmt.Errorf("from %q: a value cannot be moved into itself", *op.From)
	}
	removed, err := t.removeValue(from)
	if err != nil {
		return fmt.Errorf("from %q: %w", *op.From, err)
	}
	return t.setValue(path, removed, true)
}

// splitPointer returns the unescaped tokens of a JSON pointer. op is the name of the operation and
// field the name of the operation's field that contains the pointer. Both are used in errors.
func splitPointer(op, field string, pointer *string) ([]string, error) {
	if pointer == nil {
		return nil, fmt.Errorf("%s operation has no %q", op, field)
	}
	if *pointer == "" {
		return nil, nil
	}
	if (*pointer)[0] != '/' {
		return nil, fmt.Errorf("%s operation: %s %q does not start with a slash", op, field, truncateToken(*pointer))
	}
	if strings.Count(*pointer, "/") > maxDepth {
		return nil, fmt.Errorf("%w: a %s with more than %d parts", ErrTooLarge, field, maxDepth)
	}
	parts := strings.Split((*pointer)[1:], "/")
	for i, p := range parts {
		if strings.Contains(p, "~") {
			parts[i] = strings.ReplaceAll(strings.ReplaceAll(p, "~1", "/"), "~0", "~")
		}
	}
	return parts, nil
}

func truncateToken(s string) string {
	if len(s) > 100 {
		return s[:100] + " ..."
	}
	return s
}

var (
	errMissing = errors.New("missing value")
	// errAbsent means that the object at the end of a path has no member with the path's last
	// token. If an earlier token is missing, openPath returns errMissing.
	errAbsent = errors.New("missing value")
)

// openPath decodes the lists and objects on the path and returns them. The first is the root, the
// last is the parent of the value at the path. The path must not be empty.
func (t *tree) openPath(path []string) ([]*collection, error) {
	at := t.root
	var way []*collection
	for i := 0; ; i++ {
		b, err := t.openNode(at)
		if err != nil {
			return nil, err
		}
		if b == nil {
			return nil, fmt.Errorf("%w: %q is below a value that is neither an object nor a list", errMissing,
				truncateToken(path[i]))
		}
		if at.collection == nil {
			t.replaceOpened(way, path[:i], node{collection: b}, b.bytes-at.textSize())
		}
		way = append(way, b)
		if i == len(path)-1 {
			return way, nil
		}
		if at, err = b.child(path[i]); errors.Is(err, errAbsent) {
			return nil, fmt.Errorf("%w: no %q in the path", errMissing, truncateToken(path[i]))
		} else if err != nil {
			return nil, err
		}
	}
}

// replaceOpened replaces the value at a path by its decoded form n. ancestors are the decoded
// collections above the value, from openPath. growth is the difference in the size of the text.
func (t *tree) replaceOpened(ancestors []*collection, path []string, n node, growth int) {
	t.bytes += growth // never positive: only whitespace is removed
	if len(ancestors) == 0 {
		t.root = n
		return
	}
	last := ancestors[len(ancestors)-1]
	if token := path[len(path)-1]; last.list {
		i, _ := last.parseIndex(token, len(last.items)-1) // child has found the index already
		last.items[i] = n
	} else {
		last.members[quoteString(token)] = n
	}
	for _, b := range ancestors {
		b.bytes += growth
	}
}

func (b *collection) child(token string) (node, error) {
	if b.list {
		i, err := b.parseIndex(token, len(b.items)-1)
		if err != nil {
			return node{}, err
		}
		return b.items[i], nil
	}
	n, ok := b.members[quoteString(token)]
	if !ok {
		return node{}, fmt.Errorf("%w: no member %q", errAbsent, truncateToken(token))
	}
	return n, nil
}

// parseIndex returns the list index that a token of a path denotes. A negative index counts from
// the end, as in Kubernetes. An index above last is an error.
func (b *collection) parseIndex(token string, last int) (int, error) {
	i, err := strconv.Atoi(token)
	if err != nil || strconv.Itoa(i) != token {
		return 0, fmt.Errorf("%q is not a list index", truncateToken(token))
	}
	if i < 0 {
		i += last + 1
	}
	if i < 0 || i > last {
		return 0, fmt.Errorf("%w: the list has %d items and no index %s", errMissing, len(b.items), token)
	}
	return i, nil
}

func (t *tree) valueAt(path []string) (node, error) {
	if len(path) == 0 {
		return t.root, nil
	}
	way, err := t.openPath(path)
	if err != nil {
		return node{}, err
	}
	return way[len(way)-1].child(path[len(path)-1])
}

func (t *tree) testValue(path []string, want node) error {
	have, err := t.valueAt(path)
	if errors.Is(err, errAbsent) && want.text == "null" {
		return nil // clients of Kubernetes treat an absent member as null
	}
	if err != nil {
		return err
	}
	same, err := t.equalValues(have, want)
	if err == nil && !same {
		err = errors.New("test failed")
	}
	return err
}

// setValue replaces the value at a path, or adds it if adding is set. It copies n only after it has
// checked the size of the result. A missing member is added in both cases; a list item must exist
// to be replaced.
func (t *tree) setValue(path []string, n node, adding bool) error {
	if len(path) == 0 {
		if err := t.growBy(n.textSize() - t.bytes); err != nil {
			return err
		}
		c, err := t.copyNode(n)
		t.root = c
		return err
	}
	way, err := t.openPath(path)
	if err != nil {
		return err
	}
	token, b := path[len(path)-1], way[len(way)-1]
	if b.list && adding {
		return t.insertItem(way, token, n)
	}
	by := n.textSize()
	switch old, err := b.child(token); {
	case err == nil:
		by -= old.textSize()
	case b.list:
		return err
	default: // also for replace: clients of Kubernetes replace members that are absent
		by += len(quoteString(token)) + 1 + min(len(b.members), 1)
	}
	if err := t.growBy(by); err != nil {
		return err
	}
	if n, err = t.copyNode(n); err != nil {
		return err
	}
	if err := t.chargeWork(0, 1); err != nil {
		return err
	}
	b.setChild(token, n)
	for _, b := range way {
		b.bytes += by
	}
	return nil
}

func (b *collection) setChild(token string, n node) {
	if b.list {
		i, _ := b.parseIndex(token, len(b.items)-1)
		b.items[i] = n
		return
	}
	if b.members == nil {
		b.members = make(map[string]node)
	}
	b.members[quoteString(token)] = n
}

func (t *tree) insertItem(way []*collection, token string, n node) error {
	b := way[len(way)-1]
	i := len(b.items)
	if token != "-" {
		var err error
		if i, err = b.parseIndex(token, len(b.items)); err != nil {
			return err
		}
	}
	by := n.textSize() + min(len(b.items), 1)
	if err := t.growBy(by); err != nil {
		return err
	}
	n, err := t.copyNode(n)
	if err != nil {
		return err
	}
	if err := t.chargeWork(shiftWork*(len(b.items)-i), 1); err != nil {
		return err
	}
	b.items = append(b.items, node{})
	copy(b.items[i+1:], b.items[i:])
	b.items[i] = n
	for _, b := range way {
		b.bytes += by
	}
	return nil
}

func (t *tree) removeValue(path []string) (node, error) {
	if len(path) == 0 {
		return node{}, errors.New("the whole document cannot be removed")
	}
	way, err := t.openPath(path)
	if err != nil {
		return node{}, err
	}
	token, b := path[len(path)-1], way[len(way)-1]
	n, err := b.child(token)
	if err != nil {
		return node{}, err
	}
	by := n.textSize()
	if b.list {
		i, _ := b.parseIndex(token, len(b.items)-1)
		if err := t.chargeWork(shiftWork*(len(b.items)-i), 0); err != nil {
			return node{}, err
		}
		b.items = append(b.items[:i], b.items[i+1:]...)
		by += min(len(b.items), 1)
	} else {
		delete(b.members, quoteString(token))
		by += len(quoteString(token)) + 1 + min(len(b.members), 1)
	}
	t.bytes -= by
	for _, b := range way {
		b.bytes -= by
	}
	return n, nil
}
