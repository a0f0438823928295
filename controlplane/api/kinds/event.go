package kinds

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

func eventKind() *api.Kind {
	k := newKind[corev1.Event, corev1.EventList](names{
		gv: corev1.SchemeGroupVersion, kind: "Event", plural: "events", singular: "event", short: []string{"ev"},
	})
	k.Namespaced = true
	return k
}
