package controllers

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

// ServedByAnnotation with the value "agent" on a CSIDriver says that the cluster itself has the driver's volumes made,
// grown and deleted, by calls that the agents pass on to the driver's socket. A driver with a provisioner of its own has
// no such annotation, and is left to that.
const (
	ServedByAnnotation = "keelson.dev/served-by"
	ServedByAgent      = "agent"
)

// Which Secret the driver of a volume is given when the volume's attributes are changed, in annotations of its
// PersistentVolume: provisioners write them, and who has attributes changed reads them.
const (
	ModifySecretName      = "volume.kubernetes.io/controller-modify-secret-name"
	ModifySecretNamespace = "volume.kubernetes.io/controller-modify-secret-namespace"
)

// SecretFor is what a Secret holds, as drivers are given it; nothing where none is named.
func SecretFor(ctx context.Context, c *client.Client, ref *corev1.SecretReference) (map[string]string, error) {
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

// Served says that the cluster itself does a driver's work; nil is a driver without an object.
func Served(d *storagev1.CSIDriver) bool {
	return d != nil && d.Annotations[ServedByAnnotation] == ServedByAgent
}

// ServedVolume says that the cluster itself does the work of the driver of a volume; nil is no volume.
func ServedVolume(drivers cache.SharedIndexInformer, v *corev1.PersistentVolume) bool {
	if v == nil || v.Spec.CSI == nil {
		return false
	}
	d, _ := Cached[*storagev1.CSIDriver](drivers, "", v.Spec.CSI.Driver)
	return Served(d)
}

// DriverOn is what a node says of a driver; nil when it has none of that name.
func DriverOn(n *storagev1.CSINode, driver string) *storagev1.CSINodeDriver {
	if n == nil {
		return nil
	}
	i := slices.IndexFunc(n.Spec.Drivers, func(d storagev1.CSINodeDriver) bool { return d.Name == driver })
	if i < 0 {
		return nil
	}
	return &n.Spec.Drivers[i]
}

// Segments are where a driver says that a node is, from the node's labels; nil for a driver that does not care.
func Segments(d *storagev1.CSINodeDriver, node *corev1.Node) map[string]string {
	if d == nil || node == nil || len(d.TopologyKeys) == 0 {
		return nil
	}
	out := make(map[string]string, len(d.TopologyKeys))
	for _, k := range d.TopologyKeys {
		out[k] = node.Labels[k]
	}
	return out
}

// Unlabelled is the label that a node lacks of those by which a driver says where it is; "" when it has them all. The
// driver and the labels come in two objects: one may be known before the other, and what is decided by half of them stays
// wrong.
func Unlabelled(d *storagev1.CSINodeDriver, node *corev1.Node) string {
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

// ErrNoNode says that no node of the cluster reaches a volume.
var ErrNoNode = errors.New("no node of the cluster reaches the volume")

// Answers says that a node is heard: calls of its drivers reach them.
func Answers(n *corev1.Node) bool {
	c := NodeCondition(n, corev1.NodeReady)
	return c != nil && c.Status == corev1.ConditionTrue
}

// NodeReaching finds a node that reaches a CSI volume and has its driver: the first by name, of those that answer if there
// are any.
func NodeReaching(v *corev1.PersistentVolume, csiNodes, nodes cache.SharedIndexInformer) (string, error) {
	all, err := NodesReaching(v, csiNodes, nodes)
	if err != nil {
		return "", err
	}
	return all[0], nil
}

// NodesReaching lists the nodes that reach a CSI volume and have its driver, by name, those that do not answer last; without
// an error there is one.
func NodesReaching(v *corev1.PersistentVolume, csiNodes, nodes cache.SharedIndexInformer) (found []string, err error) {
	reaches := ""
	var silent []string
	for _, n := range CachedAll[*corev1.Node](nodes) {
		if volume.CheckNodeAffinity(v, n.Labels) != nil {
			continue
		}
		reaches = n.Name
		switch has, _ := Cached[*storagev1.CSINode](csiNodes, "", n.Name); {
		case DriverOn(has, v.Spec.CSI.Driver) == nil:
		case Answers(n):
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
	return nil, fmt.Errorf("no node that reaches the volume has CSI driver %s: %s, for example, lists what has registered in kubectl get csinode %s -o yaml",
		v.Spec.CSI.Driver, reaches, reaches)
}

// mostNodes is how many nodes are asked for a volume that does not say where it is.
const mostNodes = 32

// Reaching has something done by the driver of a volume on the nodes that reach it, one after the other until one knows the
// volume: those written by hand may not say on which node they are. It returns the node that was asked last.
func Reaching(v *corev1.PersistentVolume, csiNodes, nodes cache.SharedIndexInformer, do func(node string) error) (node string, err error) {
	all, err := NodesReaching(v, csiNodes, nodes)
	if err != nil {
		return "", err
	}
	for _, node = range all[:min(len(all), mostNodes)] {
		if err = do(node); status.Code(err) != codes.NotFound {
			break
		}
	}
	return node, err
}

// Modifies says why a driver on a node cannot be asked to give volumes the attributes of a class; the error has a code of
// gRPC, Unimplemented where the driver does not do that at all.
func Modifies(ctx context.Context, calls *LeaderDrivers, node, driver string) error {
	res, err := DriverController(calls, node, driver).ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
	if err != nil {
		return fmt.Errorf("what CSI driver %s on node %s can do is not known: %w", driver, node, err)
	}
	if slices.ContainsFunc(res.GetCapabilities(), func(c *csi.ControllerServiceCapability) bool {
		return c.GetRpc().GetType() == csi.ControllerServiceCapability_RPC_MODIFY_VOLUME
	}) {
		return nil
	}
	return status.Errorf(codes.Unimplemented, "CSI driver %s gives volumes no attributes of a VolumeAttributesClass: it does not have the capability MODIFY_VOLUME; name no class, or use a driver that has it", driver)
}

// WrongAttributes says that a class of attributes is another driver's.
func WrongAttributes(class *storagev1.VolumeAttributesClass, driver string) error {
	return status.Errorf(codes.InvalidArgument, "VolumeAttributesClass %s is of CSI driver %s, and the volume is of %s: name a class of that driver", class.Name, class.DriverName, driver)
}

// LeaderDrivers calls CSI drivers on nodes under one leadership. No fence stops a driver: every call is preceded by a linearizable
// read in the term of the leadership, so that a leader that was replaced calls none. Only Term.Drivers makes one.
type LeaderDrivers struct {
	calls   api.NodeDrivers
	confirm func(context.Context) error
}

// Drivers returns the drivers as this leadership may call them; nil when there are none.
func (t *Term) Drivers(calls api.NodeDrivers) *LeaderDrivers {
	if calls == nil {
		return nil
	}
	return &LeaderDrivers{calls: calls, confirm: func(ctx context.Context) error {
		if err := t.ConfirmLeadership(ctx); err != nil {
			return status.Errorf(codes.Unavailable, "the driver is not called: %v", err)
		}
		return nil
	}}
}

// DriverController calls the Controller service of a driver on a node.
func DriverController(calls *LeaderDrivers, node, driver string) csi.ControllerClient {
	return csi.NewControllerClient(onNode{calls, node, driver})
}

// DriverGroups calls the GroupController service of a driver on a node.
func DriverGroups(calls *LeaderDrivers, node, driver string) csi.GroupControllerClient {
	return csi.NewGroupControllerClient(onNode{calls, node, driver})
}

// DriverNode calls the Node service of a driver on a node, as far as the node's agent passes such calls on: for the growth
// of volumes that it has mounted, of which it knows where they are.
func DriverNode(calls *LeaderDrivers, node, driver string) csi.NodeClient {
	return csi.NewNodeClient(onNode{calls, node, driver})
}

// onNode is a connection whose calls the node's agent passes on.
type onNode struct {
	calls        *LeaderDrivers
	node, driver string
}

func (c onNode) Invoke(ctx context.Context, method string, q, answer any, _ ...grpc.CallOption) error {
	in, ok := q.(proto.Message)
	out, ok2 := answer.(proto.Message)
	if !ok || !ok2 {
		return fmt.Errorf("call %s of CSI driver %s: %T is no message", method, c.driver, q)
	}
	b, err := proto.Marshal(in)
	if err != nil {
		return fmt.Errorf("call %s of CSI driver %s: %w", method, c.driver, err)
	}
	if b, err = c.calls.calls.CallDriver(ctx, c.node, c.driver, method, b, c.calls.confirm); err != nil {
		return err
	}
	if err := proto.Unmarshal(b, out); err != nil {
		return fmt.Errorf("the answer of CSI driver %s on node %s to %s: %w", c.driver, c.node, method, err)
	}
	return nil
}

func (c onNode) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, status.Error(codes.Unimplemented, "drivers are called, and do not stream")
}

// Refused says of the error of a call that it was not made, or changed nothing and is not under way.
func Refused(err error) bool {
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

// Exhausted says that a driver has no room on its node, or that the node has no such driver: it may go well elsewhere.
func Exhausted(err error) bool {
	var missing *api.DriverMissing
	return errors.As(err, &missing) || status.Code(err) == codes.ResourceExhausted
}

// Words are what an error of a driver says to a user.
func Words(err error) string {
	var said interface{ GRPCStatus() *status.Status }
	if errors.As(err, &said) {
		return said.GRPCStatus().Code().String() + ": " + said.GRPCStatus().Message()
	}
	return err.Error()
}
