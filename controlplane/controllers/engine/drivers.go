package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-helpers/storage/volume"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
)

// ServedByAnnotation with value ServedByAgent on a CSIDriver means that the control plane
// provisions, expands and deletes the driver's volumes. It calls the driver through the agents of
// the nodes, which forward the calls to the driver's socket. A driver with its own provisioner does
// not have the annotation, and the control plane leaves the work to that provisioner.
const (
	ServedByAnnotation = "keelson.dev/served-by"
	ServedByAgent      = "agent"
)

// Annotations of a PersistentVolume that name the Secret for ControllerModifyVolume. Provisioners
// write them. The volumeattributes controller reads them.
const (
	ModifySecretName      = "volume.kubernetes.io/controller-modify-secret-name"
	ModifySecretNamespace = "volume.kubernetes.io/controller-modify-secret-namespace"
)

// ReadDriverSecret returns the data of the Secret to which ref refers, in the form that CSI calls
// take. It returns nil if ref is nil. It returns an error if the Secret does not exist.
func ReadDriverSecret(ctx context.Context, c *client.Client, ref *corev1.SecretReference) (map[string]string, error) {
	if ref == nil {
		return nil, nil
	}
	s, err := client.Get[*corev1.Secret](ctx, c, ref.Namespace, ref.Name)
	if err != nil {
		return nil, fmt.Errorf("Secret %s/%s for the CSI driver: %w", ref.Namespace, ref.Name, err)
	}
	out := make(map[string]string, len(s.Data))
	for k, v := range s.Data {
		out[k] = string(v)
	}
	return out, nil
}

// IsServedByAgent reports whether the control plane does the work of a CSI controller for the
// driver, through the agents of the nodes. d is nil for a driver without a CSIDriver object; the
// result is then false.
func IsServedByAgent(d *storagev1.CSIDriver) bool {
	return d != nil && d.Annotations[ServedByAnnotation] == ServedByAgent
}

// IsVolumeServedByAgent reports whether IsServedByAgent is true for the CSI driver of volume v. It
// returns false if v is nil or is not a CSI volume.
func IsVolumeServedByAgent(drivers cache.SharedIndexInformer, v *corev1.PersistentVolume) bool {
	if v == nil || v.Spec.CSI == nil {
		return false
	}
	d, _ := Cached[*storagev1.CSIDriver](drivers, "", v.Spec.CSI.Driver)
	return IsServedByAgent(d)
}

// FindNodeDriver returns the entry of a driver in a CSINode. It returns nil if the node does not
// have the driver.
func FindNodeDriver(n *storagev1.CSINode, driver string) *storagev1.CSINodeDriver {
	if n == nil {
		return nil
	}
	i := slices.IndexFunc(n.Spec.Drivers, func(d storagev1.CSINodeDriver) bool { return d.Name == driver })
	if i < 0 {
		return nil
	}
	return &n.Spec.Drivers[i]
}

// TopologySegments returns the topology of a node for a CSI driver: the node's labels with the
// topology keys of the driver. It returns nil for a driver without topology keys.
func TopologySegments(d *storagev1.CSINodeDriver, node *corev1.Node) map[string]string {
	if d == nil || node == nil || len(d.TopologyKeys) == 0 {
		return nil
	}
	out := make(map[string]string, len(d.TopologyKeys))
	for _, k := range d.TopologyKeys {
		out[k] = node.Labels[k]
	}
	return out
}

// MissingTopologyLabel returns the first topology key of a CSI driver for which the node has no
// label, or "". Callers must wait for missing labels, because a decision based on incomplete labels
// is not corrected later. The CSINode and the Node are separate objects, and one may be cached
// before the other.
func MissingTopologyLabel(d *storagev1.CSINodeDriver, node *corev1.Node) string {
	if d == nil || node == nil {
		return ""
	}
	for _, k := range d.TopologyKeys {
		if _, ok := node.Labels[k]; !ok {
			return k
		}
	}
	return ""
}

// ErrNoNode means that no node in the cluster can reach a volume.
var ErrNoNode = errors.New("no node of the cluster reaches the volume")

// FirstReachingNode returns the first of the nodes that ListReachingNodes returns.
func FirstReachingNode(v *corev1.PersistentVolume, csiNodes, nodes cache.SharedIndexInformer) (string, error) {
	all, err := ListReachingNodes(v, csiNodes, nodes)
	if err != nil {
		return "", err
	}
	return all[0], nil
}

// ListReachingNodes returns the nodes that can reach CSI volume v and have its driver. Ready nodes
// come first; ready and other nodes are sorted by name. Instead of an empty list it returns an
// error: ErrNoNode if no node reaches v.
func ListReachingNodes(v *corev1.PersistentVolume, csiNodes, nodes cache.SharedIndexInformer) (
	found []string, err error,
) {
	reaches := ""
	var silent []string
	for _, n := range CachedAll[*corev1.Node](nodes) {
		if volume.CheckNodeAffinity(v, n.Labels) != nil {
			continue
		}
		reaches = n.Name
		switch has, _ := Cached[*storagev1.CSINode](csiNodes, "", n.Name); {
		case FindNodeDriver(has, v.Spec.CSI.Driver) == nil:
		case api.IsNodeReady(n):
			found = append(found, n.Name)
		default:
			silent = append(silent, n.Name)
		}
	}
	slices.Sort(found)
	slices.Sort(silent)
	found = append(found, silent...)
	switch {
	case len(found) > 0:
		return found, nil
	case reaches == "":
		return nil, ErrNoNode
	}
	return nil,
		fmt.Errorf("no node that reaches the volume has CSI driver %s: for the drivers of node %s, for example, see "+
			"kubectl get csinode %s -o yaml",
			v.Spec.CSI.Driver, reaches, reaches)
}

// maxReachingNodes is the maximum number of nodes that CallReachingNodes calls.
const maxReachingNodes = 32

// CallReachingNodes calls do with the nodes that can reach volume v, one after the other, until do
// returns a result other than NotFound. Several nodes may have to be tried, because a
// PersistentVolume that a user wrote may have no node affinity. It returns the node with which do
// was called last, and the error of that call.
func CallReachingNodes(
	v *corev1.PersistentVolume, csiNodes, nodes cache.SharedIndexInformer, do func(node string) error,
) (node string, err error) {
	all, err := ListReachingNodes(v, csiNodes, nodes)
	if err != nil {
		return "", err
	}
	for _, node = range all[:min(len(all), maxReachingNodes)] {
		if err = do(node); status.Code(err) != codes.NotFound {
			break
		}
	}
	return node, err
}

// CheckModifyVolume returns an error if a driver on a node cannot modify the attributes of volumes.
// The error has a gRPC code: Unimplemented if the driver lacks the capability MODIFY_VOLUME.
func CheckModifyVolume(ctx context.Context, calls *LeaderDrivers, node, driver string) error {
	res, err := DriverController(calls, node, driver).ControllerGetCapabilities(ctx,
		&csi.ControllerGetCapabilitiesRequest{})
	if err != nil {
		return fmt.Errorf("the capabilities of CSI driver %s on node %s are not known: %w", driver, node, err)
	}
	if slices.ContainsFunc(res.GetCapabilities(), func(c *csi.ControllerServiceCapability) bool {
		return c.GetRpc().GetType() == csi.ControllerServiceCapability_RPC_MODIFY_VOLUME
	}) {
		return nil
	}
	return status.Errorf(codes.Unimplemented,
		"CSI driver %s cannot apply a VolumeAttributesClass: it lacks the capability MODIFY_VOLUME; remove the class "+
			"from the claim, or use another driver", driver)
}

// ClassDriverMismatch returns the error for a class that cannot be applied to a volume of the
// named driver, because the class belongs to another driver. Callers must compare the drivers
// first.
func ClassDriverMismatch(class *storagev1.VolumeAttributesClass, driver string) error {
	return status.Errorf(codes.InvalidArgument,
		"VolumeAttributesClass %s belongs to CSI driver %s, and the volume to %s: choose a class of that driver",
		class.Name, class.DriverName, driver)
}

// LeaderDrivers calls CSI drivers on nodes during one term of leadership. A driver cannot recognize
// calls of a replica that has lost the leadership. Therefore every call is preceded by a
// linearizable read in the raft term, so that a replaced leader makes no call. Term.Drivers is the
// only constructor.
type LeaderDrivers struct {
	calls   api.NodeDrivers
	confirm func(context.Context) error
}

// Drivers returns a LeaderDrivers that calls CSI drivers through drivers during this term of
// leadership. It returns nil if drivers is nil.
func (t *Term) Drivers(drivers api.NodeDrivers) *LeaderDrivers {
	if drivers == nil {
		return nil
	}
	return &LeaderDrivers{calls: drivers, confirm: func(ctx context.Context) error {
		if err := t.ConfirmLeadership(ctx); err != nil {
			return status.Errorf(codes.Unavailable, "the driver is not called: %v", err)
		}
		return nil
	}}
}

// DriverController returns a client of the Controller service of a driver on a node.
func DriverController(calls *LeaderDrivers, node, driver string) csi.ControllerClient {
	return csi.NewControllerClient(driverConn{calls, node, driver})
}

// DriverGroups returns a client of the GroupController service of a driver on a node.
func DriverGroups(calls *LeaderDrivers, node, driver string) csi.GroupControllerClient {
	return csi.NewGroupControllerClient(driverConn{calls, node, driver})
}

// DriverNode returns a client of the Node service of a driver on a node. The agent of the node
// forwards only calls that expand volumes that the node has mounted, and inserts the paths of those
// volumes.
func DriverNode(calls *LeaderDrivers, node, driver string) csi.NodeClient {
	return csi.NewNodeClient(driverConn{calls, node, driver})
}

// driverConn is a gRPC connection to a CSI driver on a node. The agent of the node forwards its
// calls to the driver.
type driverConn struct {
	calls        *LeaderDrivers
	node, driver string
}

func (c driverConn) Invoke(ctx context.Context, method string, q, answer any, _ ...grpc.CallOption) error {
	in, ok := q.(proto.Message)
	out, ok2 := answer.(proto.Message)
	if !ok || !ok2 {
		return fmt.Errorf("call %s of CSI driver %s: %T is not a protobuf message", method, c.driver, q)
	}
	b, err := proto.Marshal(in)
	if err != nil {
		return fmt.Errorf("call %s of CSI driver %s: %w", method, c.driver, err)
	}
	if b, err = c.calls.calls.CallDriver(ctx, c.node, c.driver, method, b, c.calls.confirm); err != nil {
		return err
	}
	if err := proto.Unmarshal(b, out); err != nil {
		return fmt.Errorf("the response of CSI driver %s on node %s to %s: %w", c.driver, c.node, method, err)
	}
	return nil
}

func (c driverConn) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (
	grpc.ClientStream, error,
) {
	return nil, status.Error(codes.Unimplemented, "streaming calls of CSI drivers are not supported")
}

// IsCallWithoutEffect reports whether err, the error of a driver call, means that the call has no
// effect. This is so if the driver was not called. It is also so if the driver has changed nothing
// and is not processing the call.
func IsCallWithoutEffect(err error) bool {
	var missing *api.DriverMissing
	if errors.As(err, &missing) {
		return true
	}
	s, ok := status.FromError(err)
	if !ok {
		return false
	}
	switch s.Code() {
	case codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.Aborted, codes.Unknown, codes.Internal:
		return false
	}
	return true
}

// IsDriverExhausted reports whether err means that the driver has no capacity on its node, or that
// the node lacks the driver. A call on another node may then succeed.
func IsDriverExhausted(err error) bool {
	var missing *api.DriverMissing
	return errors.As(err, &missing) || status.Code(err) == codes.ResourceExhausted
}

// DriverErrorText returns the text of err, the error of a driver call, for events and conditions:
// its gRPC code and message, if it has them.
func DriverErrorText(err error) string {
	var said interface{ GRPCStatus() *status.Status }
	if errors.As(err, &said) {
		return said.GRPCStatus().Code().String() + ": " + said.GRPCStatus().Message()
	}
	return err.Error()
}
