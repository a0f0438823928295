package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/controlplane/controllers/deployment"
	"keelson.dev/keelson/controlplane/controllers/endpoints"
	"keelson.dev/keelson/controlplane/controllers/endpointslice"
	"keelson.dev/keelson/controlplane/controllers/garbagecollector"
	"keelson.dev/keelson/controlplane/controllers/namespace"
	"keelson.dev/keelson/controlplane/controllers/nodecidr"
	"keelson.dev/keelson/controlplane/controllers/nodelifecycle"
	"keelson.dev/keelson/controlplane/controllers/persistentvolume"
	"keelson.dev/keelson/controlplane/controllers/podgc"
	"keelson.dev/keelson/controlplane/controllers/replicaset"
	"keelson.dev/keelson/controlplane/controllers/serviceaccount"
	"keelson.dev/keelson/controlplane/controllers/volumeprotection"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/scheduler"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/lifecycle"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
)

func (r *Replica) wireLeader() {
	d := controllers.Deps{
		Client: r.client, Informers: r.informers, Log: r.log.With("part", "controllers"),
		Timeline: r.timeline, Replica: r.cfg.Name, Now: time.Now,
	}
	r.engine = controllers.NewEngine(d, controllers.Options{},
		deployment.New(d), replicaset.New(d), endpointslice.New(d), endpoints.New(d),
		garbagecollector.New(d), namespace.New(d),
		nodelifecycle.New(d, nodelifecycle.Options{PodEviction: r.cfg.PodEviction}),
		nodecidr.New(d, nodecidr.Options{ClusterCIDR: r.cluster.ClusterCIDR}),
		persistentvolume.New(d), volumeprotection.New(d), podgc.New(d, podgc.Options{}),
		serviceaccount.New(d, r.trust.CA.PEM()),
	)
	r.scheduler = scheduler.New(scheduler.Config{
		Client:    r.client.As(api.User{Name: api.UserScheduler, Groups: []string{api.GroupAuthenticated}}),
		Informers: r.informers, Actor: "scheduler/" + r.cfg.Name, Timeline: r.timeline, Log: r.log.With("part", "scheduler"),
	})
}

// lead does everything that only the leader does, until leadership ends. Work
// that fails is begun again: leadership is raft's to take away.
func (r *Replica) lead(ctx context.Context, fence raftstore.Fence) error {
	retry := backoff.Backoff{Min: 50 * time.Millisecond, Max: 2 * time.Second}
	for {
		err := r.leadOnce(ctx, uint64(fence))
		if ctx.Err() != nil {
			return nil
		}
		r.log.Error("the leader's work stopped and begins again", "err", err)
		if err := wait.Delay(ctx, retry.Next()); err != nil {
			return nil
		}
	}
}

func (r *Replica) leadOnce(ctx context.Context, fence uint64) error {
	began := time.Now()
	if err := r.informers.WaitForSync(ctx); err != nil {
		return fmt.Errorf("waiting for the informers: %w", err)
	}
	if err := r.api.EnsureBootstrap(ctx); err != nil {
		return fmt.Errorf("writing the default objects: %w", err)
	}
	if err := r.storeFounderTokens(ctx, fence); err != nil {
		return err
	}
	r.log.Info("leading", "term", fence, "after", time.Since(began))
	system := r.client.As(api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters, api.GroupAuthenticated}}).Fenced(fence)
	return lifecycle.Run(ctx,
		lifecycle.Part{Name: "controllers", Run: func(ctx context.Context) error { return r.engine.Run(ctx, fence) }},
		lifecycle.Part{Name: "scheduler", Run: func(ctx context.Context) error { return r.scheduler.Run(ctx, fence) }},
		lifecycle.Part{Name: "fleet", Run: func(ctx context.Context) error { return r.fleet.RunLeader(ctx, system) }},
		lifecycle.Part{Name: "kubernetes service", Run: r.keepKubernetesService},
	)
}

// keepKubernetesService makes Service default/kubernetes follow the ready replicas.
func (r *Replica) keepKubernetesService(ctx context.Context) error {
	for {
		ready, changed := r.peers.readyAPIs()
		if len(ready) > 0 {
			if err := r.api.EnsureKubernetesService(ctx, r.cluster.serviceIP(), ready); err != nil {
				return fmt.Errorf("writing Service default/kubernetes: %w", err)
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// storeFounderTokens records the first join tokens, which were made before there was a store.
func (r *Replica) storeFounderTokens(ctx context.Context, fence uint64) error {
	path := filepath.Join(r.cfg.DataDir, foundersFile)
	var f founder
	found, err := readJSON(path, &f)
	if err != nil || !found {
		return err
	}
	if len(f.Tokens) == 0 {
		return nil
	}
	for _, text := range f.Tokens {
		t, err := pki.ParseToken(text)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if err := r.recordToken(ctx, fence, t, f.Expires, "made with the cluster"); err != nil {
			return err
		}
	}
	// The file stays and marks the founder; the secrets in it go.
	if err := writeJSON(path, founder{Expires: f.Expires}); err != nil {
		return err
	}
	r.pending.Store(false)
	return nil
}

func (r *Replica) recordToken(ctx context.Context, fence uint64, t pki.Token, expires time.Time, note string) error {
	c := r.client.As(api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters, api.GroupAuthenticated}}).Fenced(fence)
	_, err := client.Create[*v1.Secret](ctx, c, t.Record(expires, note))
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("recording join token %s: %w", t.ID, err)
	}
	return nil
}

// isFounder says whether this replica made the cluster, and so begins its raft group.
func (c Config) isFounder() bool {
	_, err := os.Stat(filepath.Join(c.DataDir, foundersFile))
	return !errors.Is(err, os.ErrNotExist)
}
