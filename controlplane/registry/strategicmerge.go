package registry

import (
	"encoding/json"
	"slices"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
)

// countComparisons estimates how many pairs of list items a strategic merge patch compares. Each
// item of a merged list in the patch is compared with each item of that list in the patch and in
// the document. A list that is replaced counts only its length.
func countComparisons(doc, patch []byte, goType runtime.Object) (int, error) {
	schema, err := strategicpatch.NewPatchMetaFromStruct(goType)
	if err != nil {
		return 0, err
	}
	var stored, patched map[string]any
	if err := json.Unmarshal(patch, &patched); err != nil {
		return 0, err
	}
	if err := json.Unmarshal(doc, &stored); err != nil {
		return 0, err
	}
	return countObject(stored, patched, schema, 0), nil
}

// maxMergeDepth is the depth of nested objects to which countObject descends. Lists at greater
// depths are not counted.
const maxMergeDepth = 64

// countObject returns the estimated number of item comparisons for one JSON object of a patch.
// stored is the object that it is merged into. The result is exact only up to maxComparisons.
func countObject(stored, patched map[string]any, schema strategicpatch.LookupPatchMeta, depth int) (n int) {
	if depth > maxMergeDepth {
		return 0
	}
	for name, value := range patched {
		switch value := value.(type) {
		case map[string]any:
			inner, _, err := schema.LookupPatchMetadataForStruct(name)
			if err != nil {
				continue // a map of scalars, or a field that the type does not have
			}
			below, _ := stored[name].(map[string]any)
			n += countObject(below, value, inner, depth+1)
		case []any:
			below, _ := stored[name].([]any)
			n += countList(below, value, name, schema, depth)
		}
		if n > maxComparisons {
			return n
		}
	}
	return n
}

// countList returns the estimated number of item comparisons for one list of a patch. stored is the
// list that it is merged into.
func countList(stored, patched []any, name string, schema strategicpatch.LookupPatchMeta, depth int) int {
	inner, meta, err := schema.LookupPatchMetadataForSlice(name)
	if err != nil || !slices.Contains(meta.GetPatchStrategies(), "merge") {
		return len(patched)
	}
	n := len(patched) * (len(patched) + len(stored))
	key := meta.GetPatchMergeKey()
	if key == "" || n > maxComparisons {
		return n
	}
	byKey := make(map[any]map[string]any, len(stored))
	for _, item := range stored {
		if o, ok := item.(map[string]any); ok && isScalar(o[key]) {
			byKey[o[key]] = o
		}
	}
	for _, item := range patched {
		o, ok := item.(map[string]any)
		if !ok || !isScalar(o[key]) {
			continue
		}
		if n += countObject(byKey[o[key]], o, inner, depth+1); n > maxComparisons {
			break
		}
	}
	return n
}

// isScalar reports whether a JSON value is a string, number, boolean or null.
func isScalar(value any) bool {
	switch value.(type) {
	case map[string]any, []any:
		return false
	}
	return true
}
