package core

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
)

// ComponentStatusKind returns the definition of the kind ComponentStatus. Its objects are computed
// from the cluster's own status on each request.
func ComponentStatusKind() *api.Kind {
	k := builder.NewVirtual[corev1.ComponentStatus](builder.Names{
		GroupVersion: corev1.SchemeGroupVersion, Kind: "ComponentStatus", Plural: "componentstatuses",
		Singular: "componentstatus", ClusterScoped: true})
	k.Naming.ShortNames = []string{"cs"}
	k.Serving.Verbs = []string{string(api.VerbGet), string(api.VerbList)}
	k.Type.NewList = func() runtime.Object { return &corev1.ComponentStatusList{} }
	k.Type.Ops = api.OpsOf[corev1.ComponentStatus, corev1.ComponentStatusList, *corev1.ComponentStatus,
		*corev1.ComponentStatusList](
		func(l *corev1.ComponentStatusList) *[]corev1.ComponentStatus { return &l.Items })
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Status"),
		builder.StringColumn("Message"),
		builder.StringColumn("Error"))
	k.Lists.Row = builder.Row(func(c *corev1.ComponentStatus, _ time.Time) []any {
		state, message, fault := "Unknown", "", ""
		for _, is := range c.Conditions {
			if is.Type != corev1.ComponentHealthy {
				continue
			}
			state, message, fault = "Unhealthy", is.Message, is.Error
			if is.Status == corev1.ConditionTrue {
				state = "Healthy"
			}
			break
		}
		return []any{c.Name, state, message, fault}
	})
	return k
}

// BindingKind returns the definition of the kind Binding. Creating a Binding has the same effect as
// the subresource "binding" of the pod with the same name.
func BindingKind() *api.Kind {
	k := builder.NewVirtual[corev1.Binding](builder.Names{GroupVersion: corev1.SchemeGroupVersion, Kind: "Binding",
		Plural: "bindings", Singular: "binding"})
	k.Serving.Acts = true
	return k
}
