package volumeprovision

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// populatorGroup is the API group of VolumePopulators. A cluster serves it once their
// CustomResourceDefinition is installed.
const populatorGroup = "populator.storage.k8s.io"

// populator is a VolumePopulator object. It declares that a volume populator is installed for
// claims with a data source of kind SourceKind.
type populator struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	SourceKind        metav1.GroupKind `json:"sourceKind"`
}

// sourceOf returns kind and name of the data source of claim c: of spec.dataSourceRef if it is set,
// otherwise of spec.dataSource.
func sourceOf(c *corev1.PersistentVolumeClaim) (kind metav1.GroupKind, name string) {
	group, from := (*string)(nil), c.Spec.DataSource
	if ref := c.Spec.DataSourceRef; ref != nil {
		group, kind.Kind, name = ref.APIGroup, ref.Kind, ref.Name
	} else if from != nil {
		group, kind.Kind, name = from.APIGroup, from.Kind, from.Name
	}
	if group != nil {
		kind.Group = *group
	}
	return kind, name
}

// reportPopulator records an event of claim c. The event names the volume populator that must fill
// the claim's volume, or states that no such populator is installed.
func (p *provisioner) reportPopulator(ctx context.Context, c *corev1.PersistentVolumeClaim) error {
	if c.DeletionTimestamp != nil || c.Spec.VolumeName != "" {
		return nil
	}
	kind, name := sourceOf(c)
	what := fmt.Sprintf("the claim's data source is %s %q", kind.String(), name)
	unknown := func(why string) {
		p.term.Events.Event(c, corev1.EventTypeWarning, "UnrecognizedDataSourceKind", what+", and "+why)
	}
	kinds := p.term.Client.Kinds().Table().Stored()
	find := func(k metav1.GroupKind) *api.Kind {
		i := slices.IndexFunc(kinds, func(have *api.Kind) bool {
			return have.GVK.Group == k.Group && have.GVK.Kind == k.Kind
		})
		if i < 0 {
			return nil
		}
		return kinds[i]
	}
	if find(kind) == nil {
		unknown("the cluster does not serve this kind: install the populator that defines it")
		return nil
	}
	if k := find(metav1.GroupKind{Group: populatorGroup, Kind: "VolumePopulator"}); k != nil {
		all, err := engine.ListTyped[populator](ctx, p.term.Client, k, "")
		if err != nil {
			return fmt.Errorf("listing VolumePopulators for claim %s/%s: %w", c.Namespace, c.Name, err)
		}
		if !slices.ContainsFunc(all, func(s engine.TypedObject[populator]) bool { return s.Typed.SourceKind == kind }) {
			unknown("no VolumePopulator supports this kind (kubectl get volumepopulators lists them): install one")
			return nil
		}
	}
	p.term.Events.Event(c, corev1.EventTypeNormal, "Provisioning",
		what+": waiting for the populator of that kind, which creates and fills the volume")
	return nil
}
