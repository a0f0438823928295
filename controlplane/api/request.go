package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
)

// User is who asks. The zero User is nobody and is refused.
type User struct {
	Name   string
	UID    string
	Groups []string
	Extra  map[string][]string
}

// Names and groups with a meaning of their own.
const (
	UserAnonymous        = "system:anonymous"
	UserController       = "system:kube-controller-manager"
	UserScheduler        = "system:kube-scheduler"
	UserAPIServer        = "system:apiserver"
	NodeUserPrefix       = "system:node:"
	ServiceAccountPrefix = "system:serviceaccount:"

	GroupMasters         = "system:masters"
	GroupNodes           = "system:nodes"
	GroupAuthenticated   = "system:authenticated"
	GroupUnauthenticated = "system:unauthenticated"
	GroupServiceAccounts = "system:serviceaccounts"
)

// NodeUser is the identity under which the fleet writes for a node.
func NodeUser(node string) User {
	return User{Name: NodeUserPrefix + node, Groups: []string{GroupNodes, GroupAuthenticated}}
}

// Verb is what is asked of a resource, in Kubernetes' words.
type Verb string

const (
	VerbGet              Verb = "get"
	VerbList             Verb = "list"
	VerbWatch            Verb = "watch"
	VerbCreate           Verb = "create"
	VerbUpdate           Verb = "update"
	VerbPatch            Verb = "patch"
	VerbDelete           Verb = "delete"
	VerbDeleteCollection Verb = "deletecollection"
	VerbConnect          Verb = "connect" // exec, attach, port-forward, log; authorised as create or get
)

// Request is one API call on a resource, from HTTP or from inside the process.
// The pipeline treats both alike: authentication has filled User, everything
// else happens after.
type Request struct {
	User        User
	Verb        Verb
	Kind        *Kind
	Subresource string
	Namespace   string // "" for cluster scope or all namespaces
	Name        string

	// Object is the decoded body of create and update. The callee owns it from
	// here on: callers hand over a copy of anything they share.
	Object runtime.Object
	// PatchType and Patch are the body of a patch.
	PatchType types.PatchType
	Patch     []byte

	Get    metav1.GetOptions
	List   metav1.ListOptions
	Create metav1.CreateOptions
	Update metav1.UpdateOptions
	PatchO metav1.PatchOptions
	Delete metav1.DeleteOptions

	// Expect waits for room for so many more bytes, before a list is put together that is not in memory yet; nil when
	// the caller is not bounded.
	Expect func(ctx context.Context, bytes int64) error
	// Pointers asks list for an *ObjectList of shared objects; for callers in this process.
	Pointers bool
	// Light says that the caller takes objects in the light form (Version.Light): it reads nothing of them that is
	// packed, or unpacks that.
	Light bool
	// Follow asks Watch for a Follower of all objects of the kind; for callers in this process.
	Follow bool

	// Fence, when not zero, is the raft term under which the write was decided.
	Fence uint64
	// ClusterVerb says that the write is part of a verb of the cluster, which alone may touch the records of join
	// tokens and of revocations. Callers in this process set it; no request over HTTP can.
	ClusterVerb bool
	// TraceParent is the W3C trace context of the caller; "" starts a new trace on create.
	TraceParent string
	// UserAgent for field managers and the audit.
	UserAgent string
	// Stages collects the time spent per stage; may be nil.
	Stages *StageTimer
}

// ErrKindExchanged is joined to the error of a request whose Kind was replaced by another Kind of the same name, for example
// because its CustomResourceDefinition changed. With status 503 nothing was written, and a retry with the current Kind can
// succeed. With status 404 the definition was deleted; a recreated definition can add a Kind of the same name.
var ErrKindExchanged = errors.New("the kind has been exchanged for another of its name")

// Backend answers requests. The apiserver's chain implements it; the server
// injects it into client, so that controllers, scheduler and fleet take the same
// road through authorization and admission as any user, without a socket.
//
// Errors are *apierrors.StatusError. Objects returned by Get, List and Watch are
// shared and immutable: callers copy before they modify.
type Backend interface {
	// Do performs every verb but watch and connect. The result of delete is the
	// deleted or terminating object, or a *metav1.Status.
	Do(ctx context.Context, r *Request) (runtime.Object, error)
	// Watch starts a watch; r.List holds its options. Bookmarks are delivered
	// when r.List.AllowWatchBookmarks, the initial state when r.List.SendInitialEvents.
	Watch(ctx context.Context, r *Request) (watch.Interface, error)
}

// NodeStreams reaches containers on nodes. The fleet implements it with tunnels;
// the server injects it into the apiserver.
type NodeStreams interface {
	// Logs streams a container's log as text lines until its end, or for ever when Follow.
	Logs(ctx context.Context, node string, r LogRequest) (io.ReadCloser, error)
	// Exec runs a command in a container, or attaches to it, until it ends. A
	// command that ended with a code other than 0 is *ExitError.
	Exec(ctx context.Context, node string, r ExecRequest, s Streams) error
	// PortForward joins conn to a port inside the pod's network namespace.
	PortForward(ctx context.Context, node string, pod types.UID, port int32, conn io.ReadWriteCloser) error
}

// NodeDrivers calls CSI drivers on nodes, by way of their agents. The fleet implements it.
type NodeDrivers interface {
	// CallDriver makes one call of a driver's Identity, Controller or GroupController service ("/csi.v1.Controller/CreateVolume"), with
	// request and answer encoded, 1 MiB at most. It ends with ctx, and after two minutes. The error is a gRPC status as
	// the driver gave it, *DriverMissing, or anything else where the node was not reached or the answer was lost: then
	// the call may have been made. confirm is called right before the call leaves this replica; when it returns an error
	// the call is not made and the error is returned.
	CallDriver(ctx context.Context, node, driver, method string, request []byte, confirm func(context.Context) error) ([]byte, error)
}

// DriverMissing says that no CSI driver of a name has registered on a node, and where it was looked for.
type DriverMissing struct{ Node, Message string }

func (e *DriverMissing) Error() string { return "node " + e.Node + ": " + e.Message }

// NodeDialer connects to pods and nodes by way of the agent of a node: from every replica that the node has a
// connection to, also when no packet finds its way from the replica to the node. The fleet implements it.
type NodeDialer interface {
	// DialNode connects to a port of an address of a pod of that node, or of the node itself when pod is empty. The
	// agent refuses addresses that are neither. ctx bounds the dialling only; the connection takes deadlines.
	DialNode(ctx context.Context, node string, pod types.UID, address string, port int32) (net.Conn, error)
}

// LogRequest selects a container's log.
type LogRequest struct {
	PodUID     types.UID
	Namespace  string
	Pod        string
	Container  string
	Follow     bool
	Previous   bool
	Timestamps bool
	SinceTime  *metav1.Time // nil = from the start
	TailLines  *int64
	LimitBytes *int64
}

// ExecRequest selects a container and a command. Attach joins the container's own process instead.
type ExecRequest struct {
	PodUID    types.UID
	Namespace string
	Pod       string
	Container string
	Command   []string
	Attach    bool
	TTY       bool
}

// TermSize is a terminal's size in characters.
type TermSize struct{ Width, Height uint16 }

// Streams are the standard streams of an exec; nil where not wanted.
type Streams struct {
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	Resize <-chan TermSize
}

// ExitError is a command that ran and failed.
type ExitError struct{ Code int }

func (e *ExitError) Error() string {
	return fmt.Sprintf("command terminated with exit code %d", e.Code)
}
