package definitions

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/version"
)

// Verdict is the decision about one definition.
type Verdict int

// Values of Verdict.
const (
	Create    Verdict = iota // the cluster has no definition of that name
	Unchanged                // the cluster has the same release
	Upgrade                  // the cluster has an older release of the same channel
	Keep                     // the cluster's definition stays: it is newer, or it is not known to be an older release of the same project
)

// String implements fmt.Stringer.
func (v Verdict) String() string {
	return [...]string{"created", "unchanged", "upgraded", "kept"}[v]
}

// Judge decides about a definition. have is the cluster's definition, or nil. The reason is set for
// Keep and Upgrade.
func (b Bundle) Judge(have, want *unstructured.Unstructured) (Verdict, string) {
	if have == nil {
		return Create, ""
	}
	if b.ChannelKey != "" {
		theirs, ours := have.GetAnnotations()[b.ChannelKey], want.GetAnnotations()[b.ChannelKey]
		if theirs != ours {
			return Keep, fmt.Sprintf("the cluster's is of channel %q, this one of %q", theirs, ours)
		}
	}
	theirs, ours := have.GetAnnotations()[b.releaseKey()], want.GetAnnotations()[b.releaseKey()]
	if theirs == ours {
		return Unchanged, ""
	}
	was, err := version.ParseSemantic(theirs)
	if err != nil {
		return Keep, fmt.Sprintf("the cluster's does not say its release in annotation %s", b.releaseKey())
	}
	is, err := version.ParseSemantic(ours)
	if err != nil || !was.LessThan(is) {
		return Keep, fmt.Sprintf("the cluster's is of release %s, which is newer than %s", theirs, ours)
	}
	if lost := storedElsewhere(have, want); len(lost) > 0 {
		return Keep, fmt.Sprintf("objects may be stored in version %s, which release %s does not have: store them in another version first",
			strings.Join(lost, ", "), ours)
	}
	return Upgrade, fmt.Sprintf("from %s to %s", theirs, ours)
}

// storedElsewhere returns the versions in which objects may be stored and that want does not have.
func storedElsewhere(have, want *unstructured.Unstructured) []string {
	stored, _, _ := unstructured.NestedStringSlice(have.Object, "status", "storedVersions")
	versions, _, _ := unstructured.NestedSlice(want.Object, "spec", "versions")
	var names []string
	for _, v := range versions {
		if m, ok := v.(map[string]any); ok {
			name, _ := m["name"].(string)
			names = append(names, name)
		}
	}
	return slices.DeleteFunc(stored, func(v string) bool { return slices.Contains(names, v) })
}
