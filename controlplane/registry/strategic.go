package registry

import (
	"encoding/json"
	"slices"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
)

// comparisons estimates how many pairs of list items a strategic merge compares. Each item of a
// merged list in the patch is compared with each item of that list in the patch and in the
// document. Lists that the type replaces count little.
func comparisons(doc, patch []byte, like runtime.Object) (int, error) {
	schema, err := strategicpatch.NewPatchMetaFromStruct(like)
	if err != nil {
		return 0, err
	}
	var has, adds map[string]any
	if err := json.Unmarshal(patch, &adds); err != nil {
		return 0, err
	}
	if err := json.Unmarshal(doc, &has); err != nil {
		return 0, err
	}
	return compareObjects(has, adds, schema, 0), nil
}

// maxMergeDepth bounds the levels of a type that are searched for merged lists.
const maxMergeDepth = 64

// compareObjects returns the comparisons of merging one object of a patch.
func compareObjects(has, adds map[string]any, schema strategicpatch.LookupPatchMeta, depth int) (n int) {
	if depth > maxMergeDepth {
		return 0
	}
	for name, value := range adds {
		switch value := value.(type) {
		case map[string]any:
			inner, _, err := schema.LookupPatchMetadataForStruct(name)
			if err != nil {
				continue // a map of scalars, or a field that the type does not have
			}
			below, _ := has[name].(map[string]any)
			n += compareObjects(below, value, inner, depth+1)
		case []any:
			below, _ := has[name].([]any)
			n += compareLists(below, value, name, schema, depth)
		}
		if n > maxComparisons {
			return n
		}
	}
	return n
}

// compareLists returns the comparisons of merging one list of a patch.
func compareLists(has, adds []any, name string, schema strategicpatch.LookupPatchMeta, depth int) int {
	inner, meta, err := schema.LookupPatchMetadataForSlice(name)
	if err != nil || !slices.Contains(meta.GetPatchStrategies(), "merge") {
		return len(adds)
	}
	n := len(adds) * (len(adds) + len(has))
	key := meta.GetPatchMergeKey()
	if key == "" || n > maxComparisons {
		return n
	}
	byKey := make(map[any]map[string]any, len(has))
	for _, item := range has {
		if o, ok := item.(map[string]any); ok && isScalar(o[key]) {
			byKey[o[key]] = o
		}
	}
	for _, item := range adds {
		o, ok := item.(map[string]any)
		if !ok || !isScalar(o[key]) {
			continue
		}
		if n += compareObjects(byKey[o[key]], o, inner, depth+1); n > maxComparisons {
			break
		}
	}
	return n
}

// isScalar reports whether a value of JSON may be a map key.
func isScalar(v any) bool {
	switch v.(type) {
	case map[string]any, []any:
		return false
	}
	return true
}
