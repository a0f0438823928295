package report

import (
	"context"
	"encoding/json"
	"fmt"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/internal/retry"
)

// csiDrivers is the Node annotation with which an agent reports its CSI drivers, as JSON. It is
// absent until the agent has searched for drivers. An empty list means that there is no driver.
const csiDrivers = "keelson.dev/csi-drivers"

// parseDrivers returns the CSI drivers in facts, the Node that the agent reported. known is false
// if it contains no list of drivers.
func parseDrivers(facts *v1.Node) (drivers []storagev1.CSINodeDriver, known bool, err error) {
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

// topologyKeys returns the names of the node labels that the CSI drivers in facts use for topology.
func topologyKeys(facts *v1.Node) map[string]bool {
	drivers, _, err := parseDrivers(facts)
	if err != nil {
		return nil // writeCSINode logs this error
	}
	keys := make(map[string]bool)
	for _, d := range drivers {
		for _, k := range d.TopologyKeys {
			keys[k] = true
		}
	}
	return keys
}

// writeCSINode creates or updates the CSINode with the drivers in facts, the Node that the agent
// reported. The owner of the CSINode is the stored node.
func (r *Reporter) writeCSINode(ctx context.Context, node, facts *v1.Node) error {
	drivers, known, err := parseDrivers(facts)
	if err != nil {
		r.log.Error("CSI drivers of the node cannot be read", "err", err) // another attempt would return the same error
		return nil
	}
	if !known {
		return nil
	}
	o, ok, _ := r.cfg.CSINodes.GetByKey(r.node) // never fails, because it reads from memory
	stored, _ := o.(*storagev1.CSINode)
	return retry.OnConflict(retry.DefaultTries, func() (again bool, err error) {
		if !ok {
			if stored, err = r.getOrCreateCSINode(ctx, node, drivers); err != nil {
				return false, r.wrapFailure(err, "register CSI drivers")
			}
		}
		want := buildCSINode(stored, node, drivers)
		if equality.Semantic.DeepEqual(stored, want) {
			return false, nil
		}
		_, err = client.Update(ctx, r.api, want)
		switch {
		case err == nil:
			return false, nil
		case apierrors.IsConflict(err), apierrors.IsNotFound(err):
			ok = false // the cached CSINode is outdated
			return true, fmt.Errorf("fleet: node %s: too many conflicts on its CSINode", r.node)
		}
		return false, r.wrapFailure(err, "update CSI drivers")
	})
}

func (r *Reporter) getOrCreateCSINode(ctx context.Context, node *v1.Node,
	drivers []storagev1.CSINodeDriver) (*storagev1.CSINode, error) {
	stored, err := client.Get[*storagev1.CSINode](ctx, r.api, "", r.node)
	if !apierrors.IsNotFound(err) {
		return stored, err
	}
	stored, err = client.Create(ctx, r.api, buildCSINode(&storagev1.CSINode{}, node, drivers))
	if apierrors.IsAlreadyExists(err) {
		return client.Get[*storagev1.CSINode](ctx, r.api, "", r.node)
	}
	return stored, err
}

// buildCSINode returns a copy of stored with these drivers and node as the owner.
func buildCSINode(stored *storagev1.CSINode, node *v1.Node, drivers []storagev1.CSINodeDriver) *storagev1.CSINode {
	out := stored.DeepCopy()
	out.Name = node.Name
	out.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}}
	out.Spec.Drivers = drivers
	return out
}
