package controllers

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/record"

	"keelson.dev/keelson/controlplane/client"
)

// recorder writes Events through cl, in the background, repeats counted and floods bounded.
func recorder(ctx context.Context, cl *client.Client, component, host string) (record.EventRecorder, func()) {
	b := record.NewBroadcaster(record.WithContext(ctx))
	b.StartRecordingToSink(eventSink{ctx: ctx, client: cl})
	return b.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component, Host: host}), b.Shutdown
}

// eventSink stores what the broadcaster has correlated.
type eventSink struct {
	ctx    context.Context
	client *client.Client
}

func (s eventSink) Create(e *corev1.Event) (*corev1.Event, error) {
	return client.Create(s.ctx, s.client, e.DeepCopy())
}

func (s eventSink) Update(e *corev1.Event) (*corev1.Event, error) {
	return client.Update(s.ctx, s.client, e.DeepCopy())
}

func (s eventSink) Patch(old *corev1.Event, data []byte) (*corev1.Event, error) {
	return client.Patch[*corev1.Event](s.ctx, s.client, old.Namespace, old.Name, "", types.StrategicMergePatchType, data)
}
