package framework

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Handle is what plugins can do. The scheduler fills it in; tests fill in what they need.
type Handle struct {
	Volumes

	// Bind assigns the pod to the node.
	Bind func(ctx context.Context, pod *v1.Pod, node string) error
	// UpdateClaim and UpdateVolume write an object at its resourceVersion.
	UpdateClaim  func(ctx context.Context, c *v1.PersistentVolumeClaim) (*v1.PersistentVolumeClaim, error)
	UpdateVolume func(ctx context.Context, v *v1.PersistentVolume) (*v1.PersistentVolume, error)
	// AwaitVolumes calls check now and after every change of a claim or volume, until it says done or fails, or ctx ends.
	AwaitVolumes func(ctx context.Context, check func() (done bool, err error)) error
	// Waiting finds a pod that Permit holds back; nil when there is none.
	Waiting func(uid types.UID) WaitingPod
	// EachWaiting calls f for every pod that Permit holds back.
	EachWaiting func(f func(WaitingPod))
}

// WaitingPod is a pod that Permit plugins hold back.
type WaitingPod interface {
	Pod() *v1.Pod
	// Allow is one plugin's consent; the pod goes on when all that waited have given it.
	Allow(plugin string)
	// Reject ends the wait and unreserves the pod.
	Reject(plugin, reason string)
}
