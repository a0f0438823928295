package nodegateway

import (
	"context"
	"encoding/json"
	"fmt"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/client"
)

// csiDrivers is the Node annotation in which an agent lists its CSI drivers as JSON. It is absent
// until the agent has looked for drivers; an empty list means that no driver exists.
const csiDrivers = "keelson.dev/csi-drivers"

// driversOf returns the CSI drivers that a node reports. known is false if it has not reported any
// list.
func driversOf(facts *v1.Node) (drivers []storagev1.CSINodeDriver, known bool, err error) {
	raw, ok := facts.Annotations[csiDrivers]
	if !ok {
		return nil, false, nil
	}
	var list []struct {
		Name, NodeID string
		TopologyKeys []string
		Allocatable  int32
	}
	if err := json.Unmarshal([]byte(raw), &list); err != nil {
		return nil, false, fmt.Errorf("annotation %s: %w", csiDrivers, err)
	}
	drivers = []storagev1.CSINodeDriver{}
	for _, d := range list {
		out := storagev1.CSINodeDriver{Name: d.Name, NodeID: d.NodeID, TopologyKeys: d.TopologyKeys}
		if d.Allocatable > 0 {
			out.Allocatable = &storagev1.VolumeNodeResources{Count: &d.Allocatable}
		}
		drivers = append(drivers, out)
	}
	return drivers, true, nil
}

// topologyKeys returns the keys of the node labels that its CSI drivers use for topology.
func topologyKeys(facts *v1.Node) map[string]bool {
	drivers, _, err := driversOf(facts)
	if err != nil {
		return nil // writeCSINode logs the error
	}
	keys := make(map[string]bool)
	for _, d := range drivers {
		for _, k := range d.TopologyKeys {
			keys[k] = true
		}
	}
	return keys
}

// csiNodeHandler triggers a sync of the node when its CSINode is changed or deleted.
func (s *Server) csiNodeHandler() cache.ResourceEventHandlerFuncs {
	look := func(o any) {
		if obj := object(o); obj != nil {
			if x := s.view.session(obj.GetName()); x != nil {
				x.syncNode()
			}
		}
	}
	return cache.ResourceEventHandlerFuncs{UpdateFunc: func(_, o any) { look(o) }, DeleteFunc: look}
}

// writeCSINode creates or updates the node's CSINode from the reported drivers, with the Node as
// its owner.
func (x *session) writeCSINode(ctx context.Context, node, facts *v1.Node) error {
	drivers, known, err := driversOf(facts)
	if err != nil {
		x.log.Error("CSI drivers of the node cannot be read", "err", err) // a retry would fail with the same error
		return nil
	}
	if !known {
		return nil
	}
	o, ok, _ := x.srv.csiNodes.GetByKey(x.node) // in-memory store: the error is always nil
	have, _ := o.(*storagev1.CSINode)
	for range 5 {
		if !ok {
			if have, err = x.getOrCreateCSINode(ctx, node, drivers); err != nil {
				return x.failed(err, "register CSI drivers")
			}
		}
		want := csiNode(have, node, drivers)
		if equality.Semantic.DeepEqual(have, want) {
			return nil
		}
		_, err := client.Update(ctx, x.api, want)
		if err == nil {
			return nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return x.failed(err, "update CSI drivers")
		}
		ok = false // the cached CSINode is outdated
	}
	return fmt.Errorf("fleet: node %s: too many conflicts on its CSINode", x.node)
}

func (x *session) getOrCreateCSINode(ctx context.Context, node *v1.Node, drivers []storagev1.CSINodeDriver) (*storagev1.CSINode, error) {
	have, err := client.Get[*storagev1.CSINode](ctx, x.api, "", x.node)
	if !apierrors.IsNotFound(err) {
		return have, err
	}
	have, err = client.Create(ctx, x.api, csiNode(&storagev1.CSINode{}, node, drivers))
	if apierrors.IsAlreadyExists(err) {
		return client.Get[*storagev1.CSINode](ctx, x.api, "", x.node)
	}
	return have, err
}

// csiNode returns a copy of have with the desired drivers and owner.
func csiNode(have *storagev1.CSINode, node *v1.Node, drivers []storagev1.CSINodeDriver) *storagev1.CSINode {
	out := have.DeepCopy()
	out.Name = node.Name
	out.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}}
	out.Spec.Drivers = drivers
	return out
}
