package controllers

import (
	"context"
	"log/slog"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/record"

	"keelson.dev/keelson/controlplane/client"
)

// recorder writes Events through cl, in the background, repeats counted and floods bounded.
func recorder(ctx context.Context, cl *client.Client, log *slog.Logger, component, host string) (record.EventRecorder, func()) {
	// The broadcaster must outlive the workers that use it; it is shut down after them.
	b := record.NewBroadcaster(record.WithContext(context.WithoutCancel(ctx)))
	b.StartRecordingToSink(eventSink{ctx: ctx, client: cl, log: log})
	return b.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component, Host: host}), b.Shutdown
}

// eventSink stores what the broadcaster has correlated. An Event that cannot be
// stored is logged here and forgotten: it never holds up or fails anything.
type eventSink struct {
	ctx    context.Context
	client *client.Client
	log    *slog.Logger
}

func (s eventSink) Create(e *corev1.Event) (*corev1.Event, error) {
	return s.lost(e)(client.Create(s.ctx, s.client, e))
}

func (s eventSink) Update(e *corev1.Event) (*corev1.Event, error) {
	return s.lost(e)(client.Update(s.ctx, s.client, e))
}

func (s eventSink) Patch(old *corev1.Event, data []byte) (*corev1.Event, error) {
	got, err := client.Patch[*corev1.Event](s.ctx, s.client, old.Namespace, old.Name, "", types.StrategicMergePatchType, data)
	if apierrors.IsNotFound(err) {
		return got, err // expired: the broadcaster makes a new one
	}
	return s.lost(old)(got, err)
}

func (s eventSink) lost(e *corev1.Event) func(*corev1.Event, error) (*corev1.Event, error) {
	return func(got *corev1.Event, err error) (*corev1.Event, error) {
		if err == nil {
			return got, nil
		}
		if s.ctx.Err() == nil && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			s.log.Warn("event lost", "reason", e.Reason, "object", e.InvolvedObject.Namespace+"/"+e.InvolvedObject.Name, "error", err)
		}
		return e, nil
	}
}
