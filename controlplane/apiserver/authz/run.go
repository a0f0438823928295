package authz

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/lifecycle"
)

// Follower keeps RBAC and Node current from the stored objects.
type Follower struct {
	Source Source
	Kinds  *api.Kinds
	RBAC   *RBAC
	Node   *Node
	Log    *slog.Logger
}

// Run follows until ctx ends and calls ready once everything has been seen.
// A kind that is not served is one without objects.
func (f Follower) Run(ctx context.Context, ready func()) error {
	sinks := []struct {
		gvr schema.GroupVersionResource
		to  sink
	}{
		{rbacv1.SchemeGroupVersion.WithResource("roles"), rbacSink{z: f.RBAC}},
		{rbacv1.SchemeGroupVersion.WithResource("clusterroles"), rbacSink{z: f.RBAC, clustered: true}},
		{rbacv1.SchemeGroupVersion.WithResource("rolebindings"), rbacSink{z: f.RBAC, binding: true}},
		{rbacv1.SchemeGroupVersion.WithResource("clusterrolebindings"), rbacSink{z: f.RBAC, binding: true, clustered: true}},
		{schema.GroupVersionResource{Version: "v1", Resource: "pods"}, f.Node},
	}
	var parts []lifecycle.Part
	var waiting sync.WaitGroup
	for _, s := range sinks {
		kind := f.Kinds.ByResource(s.gvr)
		if kind == nil {
			continue
		}
		waiting.Add(1)
		var once sync.Once
		parts = append(parts, lifecycle.Part{Name: "authz " + s.gvr.Resource, Run: func(ctx context.Context) error {
			return follow(ctx, f.Log, f.Source, kind, s.to, func() { once.Do(waiting.Done) })
		}})
	}
	if len(parts) == 0 {
		return fmt.Errorf("authorization: none of the kinds it rests on is served")
	}
	parts = append(parts, lifecycle.Part{Name: "authz ready", Run: func(ctx context.Context) error {
		seen := make(chan struct{})
		go func() { waiting.Wait(); close(seen) }()
		select {
		case <-seen:
			ready()
		case <-ctx.Done():
		}
		<-ctx.Done()
		return ctx.Err()
	}})
	return lifecycle.Run(ctx, parts...)
}
