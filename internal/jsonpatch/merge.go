package jsonpatch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
)

// Merge applies a JSON merge patch to doc, which must be a JSON object, and returns the result. The
// result may have at most maxBytes bytes, or as many as doc if doc is larger. An error that wraps
// neither ErrMalformed nor ErrTooLarge means that the patch does not apply to doc.
func Merge(ctx context.Context, doc, patch []byte, maxBytes int) ([]byte, error) {
	if !json.Valid(patch) {
		return nil, fmt.Errorf("%w: not JSON", ErrMalformed)
	}
	t := newTree(doc, maxBytes)
	changes := newTree(patch, maxBytes).root
	if !changes.isObject() {
		return nil, fmt.Errorf("%w: the patch is not a JSON object", ErrMalformed)
	}
	if !t.root.isObject() {
		return nil, errors.New("a merge patch applies only to a JSON object")
	}
	b, err := t.openNode(t.root)
	if err != nil {
		return nil, err
	}
	t.bytes += b.bytes - t.root.textSize()
	t.root = node{collection: b}
	if err := t.mergeObject(ctx, b, changes, 0); err != nil {
		return nil, err
	}
	return t.encode(), nil
}

// mergeObject applies the members of the merge patch changes to the decoded object target. It calls
// itself for nested objects; depth is the level of nesting.
func (t *tree) mergeObject(ctx context.Context, target *collection, changes node, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("%w: more than %d nested objects", ErrTooLarge, maxDepth)
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("applying a merge patch: %w", err)
	}
	from, err := t.openNode(changes)
	if err != nil {
		return err
	}
	for key, change := range from.members { // deletions first: they free space for additions
		if old, there := target.members[key]; there && change.text == "null" {
			delete(target.members, key)
			by := len(key) + 1 + old.textSize() + min(len(target.members), 1)
			target.bytes -= by
			t.bytes -= by
		}
	}
	for key, change := range from.members {
		old, there := target.members[key]
		switch {
		case change.text == "null":
		case change.isObject():
			if !there || !old.isObject() {
				if err := t.setMember(target, key, node{text: "{}"}); err != nil {
					return err
				}
				old = target.members[key]
			}
			before := old.textSize()
			inner, err := t.openNode(old)
			if err != nil {
				return err
			}
			target.members[key] = node{collection: inner}
			if old.collection == nil {
				t.bytes += inner.bytes - before
			}
			if err := t.mergeObject(ctx, inner, change, depth+1); err != nil {
				return err
			}
			target.bytes += inner.bytes - before
		default:
			if err := t.setMember(target, key, change); err != nil {
				return err
			}
		}
	}
	return nil
}

func (t *tree) setMember(into *collection, key string, n node) error {
	by := n.textSize()
	if old, there := into.members[key]; there {
		by -= old.textSize()
	} else {
		by += len(key) + 1 + min(len(into.members), 1)
	}
	if err := t.growBy(by); err != nil {
		return err
	}
	if err := t.chargeWork(0, 1); err != nil {
		return err
	}
	if into.members == nil {
		into.members = make(map[string]node)
	}
	into.members[key] = n
	into.bytes += by
	return nil
}
