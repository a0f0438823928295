package authz

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/follow"
	"keelson.dev/keelson/internal/lifecycle"
)

// Follower keeps RBAC and Node up to date with the stored objects, by watches.
type Follower struct {
	Source follow.Source
	Kinds  *api.Kinds
	RBAC   *RBAC
	Node   *Node
	Log    *slog.Logger

	positions [len(followed)]follow.Position
}

// followed are the resources that the Follower watches: all RBAC resources, and pods.
var followed = [...]schema.GroupVersionResource{
	rbacv1.SchemeGroupVersion.WithResource("roles"),
	rbacv1.SchemeGroupVersion.WithResource("clusterroles"),
	rbacv1.SchemeGroupVersion.WithResource("rolebindings"),
	rbacv1.SchemeGroupVersion.WithResource("clusterrolebindings"),
	{Version: "v1", Resource: "pods"},
}

// Mark contains the revision up to which a Follower has applied each followed resource.
type Mark [len(followed)]uint64

// Mark returns the revisions up to which the Follower has applied changes.
func (f *Follower) Mark() (m Mark) {
	for i := range f.positions {
		m[i] = f.positions[i].Revision()
	}
	return m
}

// ApplyNewest waits until the Follower has applied every change that was committed before the call.
// It then reports whether the Follower has applied changes since the mark.
func (f *Follower) ApplyNewest(ctx context.Context, mark Mark) (bool, error) {
	asked := false
	for i, gvr := range followed {
		kind := f.Kinds.ByResource(gvr)
		if kind == nil {
			continue
		}
		// The revision that the first read confirmed is sufficient for the other kinds.
		if err := f.positions[i].CaughtUp(ctx, f.Source, kind, asked); err != nil {
			return false, err
		}
		asked = true
	}
	return f.Mark() != mark, nil
}

// placedSink is a sink with a recorded position: the revision of its last change.
type placedSink struct {
	follow.Sink
	*follow.Position
}

// Run applies the stored objects and their changes until ctx is done. It calls ready once the
// initial objects of all kinds are applied. A kind that is not served counts as having no objects.
func (f *Follower) Run(ctx context.Context, ready func()) error {
	sinks := [len(followed)]follow.Sink{
		rbacSink{rbac: f.RBAC}, rbacSink{rbac: f.RBAC, clustered: true}, rbacSink{rbac: f.RBAC, binding: true},
		rbacSink{rbac: f.RBAC, binding: true, clustered: true}, f.Node,
	}
	var parts []lifecycle.Part
	var waiting sync.WaitGroup
	for i, gvr := range followed {
		kind := f.Kinds.ByResource(gvr)
		if kind == nil {
			continue
		}
		waiting.Add(1)
		var once sync.Once
		parts = append(parts, lifecycle.Part{Name: "authz " + gvr.Resource, Run: func(ctx context.Context) error {
			return follow.Run(ctx, f.Log, f.Source, kind, placedSink{sinks[i], &f.positions[i]}, func() {
				once.Do(waiting.Done)
			})
		}})
	}
	if len(parts) == 0 {
		return fmt.Errorf("authorization: the RBAC kinds are not served")
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
