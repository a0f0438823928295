package fake

import (
	"cmp"
	"context"
	"maps"
	"path/filepath"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
)

// Volumes simulates the mounting of volumes. It returns paths that do not exist. It implements
// agent.Volumes.
type Volumes struct {
	Root string // folder of the mounts; "" = "/fake/volumes"

	Script
	Clock Clock

	mu      sync.Mutex
	mounted map[types.UID]bool
}

var _ agent.Volumes = (*Volumes)(nil)

// MountAll returns a simulated mount for each volume of the pod. It implements agent.Volumes.
func (v *Volumes) MountAll(ctx context.Context, pod *v1.Pod) (map[string]agent.Mount, error) {
	if err := v.enterVerb(ctx, v.Clock, "MountAll", pod.Name); err != nil {
		return nil, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.mounted == nil {
		v.mounted = map[types.UID]bool{}
	}
	v.mounted[pod.UID] = true
	out := map[string]agent.Mount{}
	for _, vol := range pod.Spec.Volumes {
		out[vol.Name] = agent.Mount{HostPath: filepath.Join(cmp.Or(v.Root, "/fake/volumes"), string(pod.UID), vol.Name),
			ReadOnly: vol.ConfigMap != nil || vol.Secret != nil || vol.Projected != nil}
	}
	return out, nil
}

// Refresh returns the failure that the Script specifies for "Refresh". It implements agent.Volumes.
func (v *Volumes) Refresh(ctx context.Context, pod *v1.Pod) error {
	return v.enterVerb(ctx, v.Clock, "Refresh", pod.Name)
}

// AbortIO returns the failure that the Script specifies for "GiveUp". It implements agent.Volumes.
func (v *Volumes) AbortIO(ctx context.Context, pod types.UID) error {
	return v.enterVerb(ctx, v.Clock, "GiveUp", string(pod))
}

// UnmountAll removes the simulated mounts of a pod. It implements agent.Volumes.
func (v *Volumes) UnmountAll(ctx context.Context, pod types.UID) error {
	if err := v.enterVerb(ctx, v.Clock, "UnmountAll", string(pod)); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.mounted, pod)
	return nil
}

// Pods returns the UIDs of the pods with simulated mounts. It implements agent.Volumes.
func (v *Volumes) Pods() ([]types.UID, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Sorted(maps.Keys(v.mounted)), nil
}
