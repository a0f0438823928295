package session

import (
	"context"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
)

func (s *Session) Pod(uid types.UID) (*v1.Pod, bool)                         { return nil, false }
func (s *Session) Pods() []*v1.Pod                                           { return nil }
func (s *Session) ConfigMap(namespace, name string) (*v1.ConfigMap, bool)    { return nil, false }
func (s *Session) Secret(namespace, name string) (*v1.Secret, bool)          { return nil, false }
func (s *Session) Claim(ns, name string) (*v1.PersistentVolumeClaim, bool)   { return nil, false }
func (s *Session) PersistentVolume(name string) (*v1.PersistentVolume, bool) { return nil, false }
func (s *Session) CSIDriver(name string) (*storagev1.CSIDriver, bool)        { return nil, false }
func (s *Session) Services() []*v1.Service                                   { return nil }
func (s *Session) Service(namespace, name string) (*v1.Service, bool)        { return nil, false }
func (s *Session) EndpointSlices() []*discoveryv1.EndpointSlice              { return nil }
func (s *Session) Nodes() []*v1.Node                                         { return nil }
func (s *Session) Token(ctx context.Context, pod *v1.Pod, audience string, expirationSeconds int64) (string, time.Time, error) {
	return "", time.Time{}, ctx.Err()
}
func (s *Session) Revision() uint64                                            { return 0 }
func (s *Session) Synced() <-chan struct{}                                     { return nil }
func (s *Session) Changes(ctx context.Context) <-chan map[string]struct{}      { return nil }
func (s *Session) Cluster() agent.Cluster                                      { return agent.Cluster{} }
func (s *Session) PodStatus(pod *v1.Pod)                                       {}
func (s *Session) PodGone(namespace, name string, uid types.UID)               {}
func (s *Session) Event(e *v1.Event)                                           {}
func (s *Session) Stages(traceParent, object string, stages []agent.StageTime) {}
func (s *Session) ProxyApplied(revision uint64)                                {}
func (s *Session) StopGate(pod types.UID) <-chan struct{}                      { return nil }
func (s *Session) Facts(node *v1.Node)                                         {}
