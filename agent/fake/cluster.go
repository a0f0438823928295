package fake

import (
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
)

// Cluster simulates a session in memory: it implements agent.Objects and agent.Reporter. A reported
// status is written into the pod that Pods returns, as the control plane would do. Use NewCluster;
// the zero value is not usable.
type Cluster struct {
	agent.Objects // the stored objects, in store

	Clock Clock
	About agent.Cluster // result of the method Cluster

	store *objectStore

	mu    sync.Mutex
	cond  chan struct{} // closed and replaced at each report
	gates map[types.UID]chan struct{}
	gated bool

	history map[types.UID][]v1.PodStatus
	gone    map[types.UID]bool
	events  map[string]*v1.Event
	order   []string
	stages  []agent.StageTime
	node    *v1.Node
}

var (
	_ agent.Objects  = (*Cluster)(nil)
	_ agent.Reporter = (*Cluster)(nil)
)

// NewCluster returns an empty cluster that is already synced.
func NewCluster() *Cluster {
	c := &Cluster{About: agent.Cluster{Name: "fake", Domain: "cluster.local", ServiceCIDR: "10.96.0.0/12",
		ClusterCIDR: "10.88.0.0/16"},
		cond:  make(chan struct{}),
		gates: map[types.UID]chan struct{}{}, history: map[types.UID][]v1.PodStatus{}, gone: map[types.UID]bool{},
		events: map[string]*v1.Event{}}
	c.store = newObjectStore(&c.Clock, &c.About)
	c.Objects = c.store
	return c
}

// Put stores objects: pods, Services, ConfigMaps and so on. It replaces objects with the same kind,
// namespace and name. It panics for an unknown type.
func (c *Cluster) Put(objs ...any) { c.store.putObjects(objs...) }

// Delete removes objects from the cluster by kind, namespace and name.
func (c *Cluster) Delete(objs ...any) { c.store.deleteObjects(objs...) }

// Unconfirmed makes the objects count as loaded from a checkpoint, and not confirmed by a control
// plane, until confirm is called.
func (c *Cluster) Unconfirmed() (confirm func()) { return c.store.setUnconfirmed() }
