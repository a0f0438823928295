package kinds

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
)

// componentStatusKind is that of the statuses that are made of what the cluster knows of itself when somebody asks.
func componentStatusKind() *api.Kind {
	k := newVirtual[corev1.ComponentStatus](names{
		gv: corev1.SchemeGroupVersion, kind: "ComponentStatus", plural: "componentstatuses", singular: "componentstatus", global: true})
	k.ShortNames = []string{"cs"}
	k.Verbs = []string{string(api.VerbGet), string(api.VerbList)}
	k.NewList = func() runtime.Object { return &corev1.ComponentStatusList{} }
	k.Ops = api.OpsOf[corev1.ComponentStatus, corev1.ComponentStatusList, *corev1.ComponentStatus, *corev1.ComponentStatusList](
		func(l *corev1.ComponentStatusList) *[]corev1.ComponentStatus { return &l.Items })
	k.Columns = columns(nameCol, col("Status"), col("Message"), col("Error"))
	k.Row = row(func(c *corev1.ComponentStatus, _ time.Time) []any {
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

// bindingKind takes what subresource binding of pods takes, with the pod's name in the body.
func bindingKind() *api.Kind {
	k := newVirtual[corev1.Binding](names{gv: corev1.SchemeGroupVersion, kind: "Binding", plural: "bindings", singular: "binding"})
	k.Acts = true
	return k
}
