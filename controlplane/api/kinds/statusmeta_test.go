package kinds_test

import (
	"maps"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// statusKeeps lists the metadata that a request to the status of a kind cannot change, as in Kubernetes 1.37.
var statusKeeps = map[string][]string{
	"Pod":        {"ownerReferences"},
	"Deployment": {"labels"},
	"APIService": allMetadata, "PodGroup": allMetadata, "ServiceCIDR": allMetadata, "ResourceClaim": allMetadata,
	"VolumeAttachment": allMetadata, "ValidatingAdmissionPolicy": allMetadata,
}

var allMetadata = []string{"annotations", "finalizers", "labels", "ownerReferences"}

// F38: a request to the status of a kind changes the metadata that it changes in Kubernetes.
func TestStatusMetadata(t *testing.T) {
	for _, k := range kinds.All().All() {
		status := k.Subresources["status"]
		if status == nil || k.Serving.Virtual {
			continue
		}
		obj, old := k.Type.New(), k.Type.New()
		obj.SetLabels(map[string]string{"a": "b"})
		obj.SetAnnotations(map[string]string{"a": "b"})
		obj.SetFinalizers([]string{"example.com/a"})
		obj.SetOwnerReferences([]metav1.OwnerReference{{Name: "a"}})
		status.PrepareUpdate(obj, old)
		left := map[string]int{"labels": len(obj.GetLabels()), "annotations": len(obj.GetAnnotations()),
			"finalizers": len(obj.GetFinalizers()), "ownerReferences": len(obj.GetOwnerReferences())}
		var kept []string
		for _, name := range slices.Sorted(maps.Keys(left)) {
			if left[name] == 0 {
				kept = append(kept, name)
			}
		}
		if !slices.Equal(kept, statusKeeps[k.GVK.Kind]) {
			t.Errorf("%s: the status keeps %q, in Kubernetes %q", k.GVK, kept, statusKeeps[k.GVK.Kind])
		}
	}
}

// unqualifiedInStatus lists the kinds whose status accepts finalizers without a domain in Kubernetes.
var unqualifiedInStatus = []string{"CronJob", "CustomResourceDefinition", "FlowSchema", "PodDisruptionBudget",
	"PriorityLevelConfiguration"}

// F38: a request to the status of a kind is refused if its finalizers or owner references have faults.
func TestStatusMetadataFaults(t *testing.T) {
	set := func(finalizers ...string) func(api.Object) {
		return func(o api.Object) { o.SetFinalizers(finalizers) }
	}
	noUID := func(o api.Object) {
		o.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "n"}})
	}
	for _, k := range kinds.All().All() {
		status := k.Subresources["status"]
		if status == nil || k.Serving.Virtual {
			continue
		}
		keeps := statusKeeps[k.GVK.Kind]
		writesFinalizers := !slices.Contains(keeps, "finalizers")
		for _, c := range []struct {
			want    string
			fault   func(api.Object)
			refused bool
		}{
			{kindstest.InvalidText("metadata.finalizers", "a b/c", validation.IsQualifiedName("a b/c")[0]),
				set("a b/c"), writesFinalizers},
			{`metadata.finalizers: Invalid value: ["orphan","foregroundDeletion"]: finalizer orphan and ` +
				`foregroundDeletion cannot be both set`,
				set("orphan", "foregroundDeletion"), writesFinalizers},
			{kindstest.InvalidText("metadata.finalizers[0]", "nodomain", kindstest.NotQualified), set("nodomain"),
				writesFinalizers && !slices.Contains(unqualifiedInStatus, k.GVK.Kind)},
			{"metadata.ownerReferences[0].uid: Required value: must not be empty", noUID,
				!slices.Contains(keeps, "ownerReferences")},
		} {
			obj, old := k.Type.New(), k.Type.New()
			for _, o := range []api.Object{obj, old} {
				o.SetName("a")
				o.SetResourceVersion("1")
			}
			c.fault(obj)
			status.PrepareUpdate(obj, old)
			got := kindstest.JoinErrors(status.ValidateUpdate(obj, old))
			if slices.Contains(strings.Split(got, "\n"), c.want) != c.refused {
				t.Errorf("%s: want %q: %v, got %s", k.GVK, c.want, c.refused, got)
			}
		}
	}
}
