// Package apiextensions describes the kinds of the API group apiextensions.k8s.io.
package apiextensions

import (
	"slices"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
)

// CustomResourceDefinitionKind returns the definition of the kind CustomResourceDefinition. Its
// validation covers only the metadata. Package apiserver/crd validates the spec, because that needs
// the schema libraries and CEL.
func CustomResourceDefinitionKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: apiextensionsv1.SchemeGroupVersion, Kind: "CustomResourceDefinition", Conditional: true,
		Plural:   "customresourcedefinitions",
		Singular: "customresourcedefinition", Short: []string{"crd", "crds"}, ClusterScoped: true,
	}, func(l *apiextensionsv1.CustomResourceDefinitionList) *[]apiextensionsv1.CustomResourceDefinition {
		return &l.Items
	})
	type definition = apiextensionsv1.CustomResourceDefinition
	k.Naming.Categories = []string{"api-extensions"}
	k.Writes.Default = builder.Default(func(c *definition) {
		apiextensionsv1.SetDefaults_CustomResourceDefinition(c)
		if conv := c.Spec.Conversion; conv.Webhook != nil && conv.Webhook.ClientConfig != nil &&
			conv.Webhook.ClientConfig.Service != nil {
			apiextensionsv1.SetDefaults_ServiceReference(conv.Webhook.ClientConfig.Service)
		}
	})
	builder.SeparateStatus(k, func(c *definition) *apiextensionsv1.CustomResourceDefinitionStatus { return &c.Status },
		builder.Accessors[*definition]{
			Spec:     func(c *definition) any { return c.Spec },
			CopySpec: func(obj, old *definition) { obj.Spec = *old.Spec.DeepCopy() },
			Status: func(obj, old *definition) {
				obj.Status = apiextensionsv1.CustomResourceDefinitionStatus{}
				if old != nil {
					obj.Status = *old.Status.DeepCopy()
				}
				recordStoredVersion(obj)
			},
		})
	k.Deletion.Finalizers = []string{apiextensionsv1.CustomResourceCleanupFinalizer}
	k.Deletion.Prepare = func(o api.Object) {
		c := o.(*definition)
		setDefinitionCondition(c, apiextensionsv1.CustomResourceDefinitionCondition{
			Type: apiextensionsv1.Terminating, Status: apiextensionsv1.ConditionTrue, Reason: "InstanceDeletionPending",
			Message:            "CustomResourceDefinition marked for deletion; CustomResource deletion will begin soon",
			LastTransitionTime: metav1.Time{Time: c.DeletionTimestamp.Time},
		})
	}
	k.Storage.Hub.Light = custom.PackedDefinitions()
	k.Schema.Types = custom.DefinitionTypes
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.CreatedAtColumn)
	k.Lists.Row = builder.Row(func(c *definition, _ time.Time) []any { return []any{c.Name, builder.CreatedAt(c)} })
	return k
}

// recordStoredVersion adds the storage version to status.storedVersions, because objects may be
// stored in it after the write.
func recordStoredVersion(c *apiextensionsv1.CustomResourceDefinition) {
	for i := range c.Spec.Versions {
		if v := &c.Spec.Versions[i]; v.Storage {
			if !slices.Contains(c.Status.StoredVersions, v.Name) {
				c.Status.StoredVersions = append(c.Status.StoredVersions, v.Name)
			}
			return
		}
	}
}

func setDefinitionCondition(
	c *apiextensionsv1.CustomResourceDefinition, set apiextensionsv1.CustomResourceDefinitionCondition,
) {
	conditions := slices.Clone(c.Status.Conditions)
	i := slices.IndexFunc(conditions, func(h apiextensionsv1.CustomResourceDefinitionCondition) bool {
		return h.Type == set.Type
	})
	if i < 0 {
		c.Status.Conditions = append(conditions, set)
		return
	}
	if conditions[i].Status == set.Status {
		set.LastTransitionTime = conditions[i].LastTransitionTime
	}
	conditions[i] = set
	c.Status.Conditions = conditions
}
