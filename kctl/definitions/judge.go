package definitions

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/version"
)

// Verdict is the decision whether Install creates, upgrades or keeps one CustomResourceDefinition.
type Verdict int

// Decisions about one CustomResourceDefinition.
const (
	Create    Verdict = iota // create it: the cluster has no CustomResourceDefinition of that name
	Unchanged                // keep it: the cluster has the same release
	Upgrade                  // replace it: the cluster has an older release of the same channel
	Keep                     // keep the cluster's: it is newer, or Judge found another reason against an upgrade
)

// String returns the verdict as a word for the output of kctl, such as "created".
func (v Verdict) String() string {
	return [...]string{"created", "unchanged", "upgraded", "kept"}[v]
}

// Judge decides whether want, a CustomResourceDefinition (CRD) of the bundle, replaces have, the
// cluster's CRD of the same name. have is nil if the cluster has no such CRD. If the verdict is
// Keep or Upgrade, the returned text is its reason; otherwise the text is empty.
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
	if lost := undefinedStoredVersions(have, want); len(lost) > 0 {
		return Keep,
			fmt.Sprintf("objects may be stored in version %s, which release %s does not have: store them in "+
				"another version first",
				strings.Join(lost, ", "), ours)
	}
	return Upgrade, fmt.Sprintf("from %s to %s", theirs, ours)
}

// undefinedStoredVersions returns the API versions in which the cluster may have stored objects
// (status.storedVersions of have), but which want does not define. If there are any, want must not
// replace have.
func undefinedStoredVersions(have, want *unstructured.Unstructured) []string {
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
