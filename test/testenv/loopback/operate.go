package loopback

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/wait"
)

// Names returns the names of the replicas in the order of Configs.
func (p *Plane) Names() []string {
	var out []string
	for _, cfg := range p.replicas {
		out = append(out, cfg.Name)
	}
	return out
}

// FleetAddress returns the address for agents of the replica with index i in Names.
func (p *Plane) FleetAddress(i int) string { return p.portAddress(i, p.fleet) }

// Config returns the client configuration of a replica's API. It must not be modified.
func (p *Plane) Config(name string) *rest.Config { return p.Configs[slices.Index(p.Names(), name)] }

// Status returns the cluster status as reported by a replica.
func (p *Plane) Status(ctx context.Context, replica string) (s api.ClusterStatus, err error) {
	cs, err := kubernetes.NewForConfig(p.Config(replica))
	if err != nil {
		return s, err
	}
	raw, err := cs.RESTClient().Get().AbsPath(api.PathClusterStatus).DoRaw(ctx)
	if err != nil {
		return s, fmt.Errorf("status by replica %s: %w", replica, err)
	}
	return s, json.Unmarshal(raw, &s)
}

// Leader returns the name of the leader as reported by the first replica that knows a leader.
func (p *Plane) Leader(ctx context.Context) (string, error) {
	var failed []error
	for _, name := range p.Names() {
		s, err := p.Status(ctx, name)
		if err == nil && s.Leader != "" {
			return s.Leader, nil
		}
		failed = append(failed, err)
	}
	return "", fmt.Errorf("no replica knows a leader: %w", errors.Join(failed...))
}

// AwaitQuiet waits until the store's revision has not changed for the time quiet.
func (p *Plane) AwaitQuiet(ctx context.Context, quiet time.Duration) error {
	last := uint64(0)
	return wait.For(ctx, quiet, func() error {
		leader, err := p.Leader(ctx)
		if err != nil {
			return err
		}
		s, err := p.Status(ctx, leader)
		if err == nil && s.Revision != last {
			last, err = s.Revision, fmt.Errorf("the store is at revision %d and still changes", s.Revision)
		}
		return err
	})
}

// StepDown makes the leader transfer its leadership to another replica.
func (p *Plane) StepDown(ctx context.Context) (r api.ClusterStepDownResult, err error) {
	cs, err := kubernetes.NewForConfig(p.Configs[0])
	if err != nil {
		return r, err
	}
	raw,
		err :=
		cs.RESTClient().Post().AbsPath(api.PathClusterStepDown).SetHeader("Content-Type", "application/json").Body(
			[]byte("{}")).DoRaw(ctx)
	if err != nil {
		return r, fmt.Errorf("transfer the leadership: %w", err)
	}
	return r, json.Unmarshal(raw, &r)
}
