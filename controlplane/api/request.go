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

// User is the identity of a client. The zero User is rejected.
type User struct {
	Name   string
	UID    string
	Groups []string
	Extra  map[string][]string
}

// User names, prefixes and groups with a special meaning.
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

// NodeUser returns the identity under which the node gateway writes on behalf of a node.
func NodeUser(node string) User {
	return User{Name: NodeUserPrefix + node, Groups: []string{GroupNodes, GroupAuthenticated}}
}

// Verb is the verb of a request on a resource, as in Kubernetes.
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
	// exec, attach, port-forward, log; authorized as create or get
	VerbConnect Verb = "connect"
)

// Request is one API call on a resource, over HTTP or from inside the process. Both are processed
// alike. Authentication has set User; all other steps follow.
type Request struct {
	User        User
	Verb        Verb
	Kind        *Kind
	Subresource string
	Namespace   string // "" for cluster scope or all namespaces
	Name        string

	// Object is the decoded body of create and update. The callee owns it: callers pass a copy of
	// an object that they share.
	Object runtime.Object
	// PatchType and Patch are the type and the body of a patch.
	PatchType types.PatchType
	Patch     []byte

	Get    metav1.GetOptions
	List   metav1.ListOptions
	Create metav1.CreateOptions
	Update metav1.UpdateOptions
	PatchO metav1.PatchOptions
	Delete metav1.DeleteOptions

	// Expect blocks until bytes more bytes fit into the memory budget of lists. It is called before
	// a list that is not in memory is assembled. nil = the caller has no budget.
	Expect func(ctx context.Context, bytes int64) error
	// Pointers requests that list returns an *ObjectList of shared objects; only for callers in
	// this process.
	Pointers bool
	// Light reports whether the caller accepts objects in the compact in-memory form
	// (Version.Light). Such a caller does not read packed fields, or unpacks them.
	Light bool
	// Follow requests that Watch returns a Follower of all objects of the kind; only for callers in
	// this process.
	Follow bool

	// Fence, if not zero, is the raft term in which the write was decided. A write of an older term
	// is rejected.
	Fence uint64
	// ClusterVerb reports whether the write is part of a cluster operation (join token,
	// revocation). Only such writes may change the records of join tokens and revocations. It is
	// set by callers in this process and never from an HTTP request.
	ClusterVerb bool
	// TraceParent is the W3C trace context of the caller; "" starts a new trace on create.
	TraceParent string
	// UserAgent is the client's User-Agent, for field managers and the audit log.
	UserAgent string
	// Stages measures the time spent in each stage; may be nil.
	Stages *StageTimer
}

// ErrKindExchanged is joined to the error of a request whose Kind was replaced by another Kind of
// the same name, for example because its CustomResourceDefinition changed. With status 503 nothing
// was written, and a retry with the current Kind can succeed. With status 404 the definition was
// deleted; a recreated definition can add a Kind of the same name.
var ErrKindExchanged = errors.New("the kind has been exchanged for another of its name")

// Backend executes requests. The apiserver's handler chain implements it. The server passes it to
// the in-process client. Controllers, scheduler and node gateway so pass the same authorization and
// admission as any user, without a socket.
//
// Errors are *apierrors.StatusError. Objects returned by Get, List and Watch are shared and
// immutable: callers copy before they modify.
type Backend interface {
	// Do executes every verb except watch and connect. A delete returns the deleted or terminating
	// object, or a *metav1.Status.
	Do(ctx context.Context, r *Request) (runtime.Object, error)
	// Watch starts a watch with the options r.List. Bookmarks are delivered if
	// r.List.AllowWatchBookmarks is set, and the initial state if r.List.SendInitialEvents is set.
	Watch(ctx context.Context, r *Request) (watch.Interface, error)
}

// NodeStreams opens streams to containers on nodes. The node gateway implements it with tunnels;
// the server passes it to the apiserver.
type NodeStreams interface {
	// Logs streams a container's log as text lines until its end, or without end if r.Follow is
	// set.
	Logs(ctx context.Context, node string, r LogRequest) (io.ReadCloser, error)
	// Exec runs a command in a container, or attaches to the container, until the process exits. An
	// exit code other than 0 is returned as *ExitError.
	Exec(ctx context.Context, node string, r ExecRequest, s Streams) error
	// PortForward connects conn to a port in the pod's network namespace and copies data until
	// either side closes.
	PortForward(ctx context.Context, node string, pod types.UID, port int32, conn io.ReadWriteCloser) error
}

// NodeDrivers calls CSI drivers on nodes through their agents. The node gateway implements it.
type NodeDrivers interface {
	// CallDriver makes one call of a driver's Identity, Controller or GroupController service
	// ("/csi.v1.Controller/CreateVolume"). request and the response are encoded messages of at most
	// 1 MiB. The call ends with ctx, and after two minutes at the latest.
	//
	// The error is the driver's gRPC status or *DriverMissing. Any other error means that the node
	// was not reached or the response was lost; the call may then have been made.
	//
	// confirm is called immediately before the call leaves this replica. If it returns an error,
	// the call is not made and that error is returned.
	CallDriver(ctx context.Context, node, driver, method string, request []byte, confirm func(context.Context) error) ([]byte, error)
}

// DriverMissing is the error that a node has no registered CSI driver of the requested name.
// Message describes where the driver was looked for.
type DriverMissing struct{ Node, Message string }

func (e *DriverMissing) Error() string { return "node " + e.Node + ": " + e.Message }

// NodeDialer connects to pods and nodes through the agent of a node. It works from every replica to
// which the node has a connection, even if the replica cannot route packets to the node. The node
// gateway implements it.
type NodeDialer interface {
	// DialNode connects to a port of an address of a pod on the node, or of the node itself if pod
	// is empty. The agent rejects all other addresses. ctx bounds only the dialing; the connection
	// supports deadlines.
	DialNode(ctx context.Context, node string, pod types.UID, address string, port int32) (net.Conn, error)
}

// LogRequest selects a container's log and the part of it to return.
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

// ExecRequest selects a container and a command. Attach attaches to the container's main process
// instead of running Command.
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

// Streams are the standard streams of an exec; nil streams are not connected.
type Streams struct {
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	Resize <-chan TermSize
}

// ExitError is the error of a command that exited with a code other than 0.
type ExitError struct{ Code int }

func (e *ExitError) Error() string {
	return fmt.Sprintf("command terminated with exit code %d", e.Code)
}
