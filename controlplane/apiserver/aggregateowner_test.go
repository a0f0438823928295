package apiserver

import (
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

// F70: the resources of an owner's kind are those that its server in the cluster has, without subresources.
func TestResourcesOfAggregatedKinds(t *testing.T) {
	b := startBehind(t)
	b.extension("good", discoveryOf("good.example.com"))
	b.apiService("good.example.com", "good", nil)
	flunder := schema.GroupVersionKind{Group: "good.example.com", Version: "v1", Kind: "Flunder"}
	b.await(func() bool {
		found := b.aggregatedResources(t.Context(), flunder)
		return len(found) == 1 && found[0].Name == "flunders" && found[0].Namespaced &&
			found[0].Group == flunder.Group && found[0].Version == flunder.Version
	})
	for _, other := range []schema.GroupVersionKind{
		flunder.GroupVersion().WithKind("Other"), {Group: "good.example.com", Version: "v2", Kind: "Flunder"},
	} {
		if found := b.aggregatedResources(t.Context(), other); len(found) != 0 {
			t.Errorf("%s is served as %+v", other, found)
		}
	}
}
