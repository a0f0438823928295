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

// User is the identity of a client. Requests with the zero User are rejected.
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

// APIServerUser returns the identity under which the API server itself writes.
func APIServerUser() User {
	return User{Name: UserAPIServer, Groups: []string{GroupMasters, GroupAuthenticated}}
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
// in the same way. Its User is already authenticated; all other steps, such as authorization,
// follow.
type Request struct {
	User        User
	Verb        Verb
	Kind        *Kind
	Subresource string
	Namespace   string // "" for cluster scope or all namespaces
	Name        string

	// Object is the decoded body of create and update. Backend.Do may modify and keep it: callers
	// pass a copy of an object that they share.
	Object runtime.Object
	// Patch is the patch of a request with the verb patch.
	Patch PatchRequest

	Get    metav1.GetOptions
	List   metav1.ListOptions
	Create metav1.CreateOptions
	Update metav1.UpdateOptions
	Delete metav1.DeleteOptions

	Internal InternalOptions
	Client   ClientInfo
}

// PatchRequest is the type, the body, and the options of a patch.
type PatchRequest struct {
	Type    types.PatchType
	Body    []byte
	Options metav1.PatchOptions
}

// InternalOptions are options that no client can set by HTTP. The HTTP handler and callers in this
// process set them.
type InternalOptions struct {
	// Expect blocks until the memory budget of lists has the given number of bytes available. It is
	// called before objects that are not in memory are decoded for a list. nil = the caller has no
	// budget.
	Expect func(ctx context.Context, bytes int64) error
	// Pointers requests that the result of a list is an *ObjectList of shared objects.
	Pointers bool
	// Light reports whether the caller accepts objects in the light form, in which some fields are
	// still encoded (Version.Light). Such a caller must call Kind.UnpackObject before it reads
	// these fields.
	Light bool
	// Follow requests that the result of Watch is a Follower of all objects of the kind. It is only
	// for callers in this process.
	Follow bool

	// Fence, if not zero, is the raft term in which the write was decided. The write is rejected if
	// that term has ended.
	Fence uint64
	// ClusterVerb reports whether the write is part of a cluster command (join token, revocation).
	// Only such writes may change the records of join tokens and revocations. It is never set for
	// an HTTP request.
	ClusterVerb bool
}

// ClientInfo describes the client of a request, for traces, field managers, and the audit log.
type ClientInfo struct {
	// TraceParent is the W3C trace context of the caller; "" starts a new trace on create.
	TraceParent string
	// UserAgent is the client's User-Agent.
	UserAgent string
	// Stages measures the time spent in each stage; may be nil.
	Stages *StageTimer
}

// ErrKindExchanged is joined to the error of a request if the request's Kind was replaced by
// another Kind of the same name, for example because its CustomResourceDefinition changed. With
// status 503, nothing was written, and a retry with the current Kind can succeed. With status 404,
// the definition was deleted; if it is recreated, a Kind of the same name is added.
var ErrKindExchanged = errors.New("the kind was replaced by another kind of the same name")

// Backend executes requests. The apiserver's handler chain implements it, and the server passes it
// to the in-process client. Controllers, the scheduler and the node gateway therefore pass the same
// authorization and admission as any user, without a network connection.
//
// Errors are *apierrors.StatusError. Objects returned by Get, List and Watch are shared and
// immutable: callers copy them before modifying them.
type Backend interface {
	// Do executes every verb except watch and connect. The result of a delete is the deleted or
	// terminating object, or a *metav1.Status.
	Do(ctx context.Context, r *Request) (runtime.Object, error)
	// Watch starts a watch with the options in r.List. Bookmarks are delivered if
	// r.List.AllowWatchBookmarks is set, and the initial objects if r.List.SendInitialEvents is
	// set.
	Watch(ctx context.Context, r *Request) (watch.Interface, error)
}

// NodeStreams opens streams to containers on nodes. The node gateway implements it with its
// connections to the agents; the server passes it to the apiserver.
type NodeStreams interface {
	// Logs streams a container's log as text lines. The stream ends at the end of the log, or does
	// not end if r.Follow is set.
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
	// ("/csi.v1.Controller/CreateVolume"). The request and the response are encoded messages of at
	// most
	// 1 MiB. The call is canceled when ctx ends, or after two minutes.
	//
	// The error is the driver's gRPC status or *DriverMissing. Any other error means that the node
	// was not reached or the response was lost; the call may then have been made.
	//
	// confirm is called immediately before this replica sends the call. If it returns an error, the
	// call is not made and that error is returned.
	CallDriver(ctx context.Context, node, driver, method string, request []byte,
		confirm func(context.Context) error) ([]byte, error)
}

// DriverMissing is the error for a node on which no CSI driver with the requested name is
// registered. Message describes where the driver was looked for.
type DriverMissing struct{ Node, Message string }

func (e *DriverMissing) Error() string { return "node " + e.Node + ": " + e.Message }

// NodeDialer connects to pods and nodes through the agent of a node. It works from every replica to
// which the node has a connection, even if the replica cannot route packets to the node. The node
// gateway implements it.
type NodeDialer interface {
	// DialNode connects to a port of an address of a pod on the node, or of the node itself if pod
	// is empty. The agent rejects all other addresses. ctx applies only until the connection is
	// established; the connection supports deadlines.
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

// ExecRequest selects a container and a command. If Attach is set, it attaches to the container's
// main process instead of running Command.
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
