package aggregation_test

import (
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// F70: the resources of an owner's kind are those that its server in the cluster has, without
// subresources.
func TestResourcesOfAggregatedKinds(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	b.Extension("good", apiservertest.DiscoveryOf("good.example.com"))
	b.AddAPIService("good.example.com", "good", nil)
	flunder := schema.GroupVersionKind{Group: "good.example.com", Version: "v1", Kind: "Flunder"}
	b.Replica.Await(func() bool {
		found := b.Replica.Server.Aggregated().ResourcesOf(t.Context(), flunder)
		return len(found) == 1 && found[0].Name == "flunders" && found[0].Namespaced &&
			found[0].Group == flunder.Group && found[0].Version == flunder.Version
	})
	for _, other := range []schema.GroupVersionKind{
		flunder.GroupVersion().WithKind("Other"), {Group: "good.example.com", Version: "v2", Kind: "Flunder"},
	} {
		if found := b.Replica.Server.Aggregated().ResourcesOf(t.Context(), other); len(found) != 0 {
			t.Errorf("%s is served as %+v", other, found)
		}
	}
}
