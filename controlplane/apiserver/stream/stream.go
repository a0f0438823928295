// Package stream connects clients to containers: logs, exec, attach and port-forward. Clients use
// SPDY or WebSockets with the subprotocols of Kubernetes. api.NodeStreams connects to the nodes.
package stream

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
)

// Server serves the byte streams of pods.
type Server struct {
	Nodes api.NodeStreams // nil = all requests get a 503
	// Error writes an error response before a stream has started.
	Error func(w http.ResponseWriter, r *http.Request, err error)
	Log   *slog.Logger
}

// connectStreams serves an exec, attach or port-forward request. options are the options of the
// request as admission has accepted them.
func (s *Server) connectStreams(w http.ResponseWriter, r *http.Request, pod *corev1.Pod, options runtime.Object) error {
	switch o := options.(type) {
	case *corev1.PodExecOptions:
		want := wantedStreams{stdin: o.Stdin, stdout: o.Stdout, stderr: o.Stderr, tty: o.TTY}
		return s.serveExec(w, r, pod, want, api.ExecRequest{Container: o.Container, Command: o.Command})
	case *corev1.PodAttachOptions:
		want := wantedStreams{stdin: o.Stdin, stdout: o.Stdout, stderr: o.Stderr, tty: o.TTY}
		return s.serveExec(w, r, pod, want, api.ExecRequest{Container: o.Container, Attach: true})
	case *corev1.PodPortForwardOptions:
		return s.portForward(w, r, pod, o.Ports)
	}
	return apierrors.NewInternalError(fmt.Errorf("unexpected options of type %T", options))
}

// ServeStream serves a subresource of the pod obj (log, exec, attach or port-forward), which req
// specifies, until the stream ends.
func (s *Server) ServeStream(w http.ResponseWriter, r *http.Request, req *api.Request, obj api.Object) {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		s.Error(w, r, apierrors.NewMethodNotSupported(req.Kind.GroupResource(), req.Subresource))
		return
	}
	if pod.Spec.NodeName == "" {
		s.Error(w, r, apierrors.NewBadRequest(fmt.Sprintf("pod %s does not have a host assigned", pod.Name)))
		return
	}
	if s.Nodes == nil {
		s.Error(w, r, apierrors.NewServiceUnavailable("this replica cannot connect to nodes"))
		return
	}
	var err error
	switch req.Subresource {
	case "log":
		err = s.serveLogs(w, r, pod)
	case "exec", "attach", "portforward":
		err = s.connectStreams(w, r, pod, req.Object)
	default:
		err = apierrors.NewMethodNotSupported(req.Kind.GroupResource(), req.Subresource)
	}
	if err != nil {
		s.Error(w, r, err)
	}
}

// resolveContainer returns the name of the container for a request that specifies name. An empty
// name means the default container of the pod, or its only container.
func resolveContainer(pod *corev1.Pod, name string) (string, error) {
	var names, init, ephemeral []string
	for i := range pod.Spec.Containers {
		names = append(names, pod.Spec.Containers[i].Name)
	}
	for i := range pod.Spec.InitContainers {
		init = append(init, pod.Spec.InitContainers[i].Name)
	}
	for i := range pod.Spec.EphemeralContainers {
		ephemeral = append(ephemeral, pod.Spec.EphemeralContainers[i].Name)
	}
	if name != "" {
		if slices.Contains(slices.Concat(names, init, ephemeral), name) {
			return name, nil
		}
		return "", apierrors.NewBadRequest(fmt.Sprintf("container %s is not valid for pod %s", name, pod.Name))
	}
	if len(names) == 1 && len(init) == 0 {
		return names[0], nil
	}
	if preferred := pod.Annotations["kubectl.kubernetes.io/default-container"]; slices.Contains(names, preferred) {
		return preferred, nil
	}
	if len(names) == 1 {
		return names[0], nil
	}
	msg := fmt.Sprintf("a container name must be specified for pod %s, choose one of: [%s]", pod.Name,
		strings.Join(names, " "))
	if len(init) > 0 {
		msg += fmt.Sprintf(" or one of the init containers: [%s]", strings.Join(init, " "))
	}
	return "", apierrors.NewBadRequest(msg)
}

// nodeError returns the error response to the client for an error of the node's agent.
func nodeError(err error, pod *corev1.Pod) error {
	var status apierrors.APIStatus
	if errors.As(err, &status) {
		return err
	}
	return apierrors.NewInternalError(fmt.Errorf("pod %s/%s on node %s: %w", pod.Namespace, pod.Name,
		pod.Spec.NodeName, err))
}

// waitingError returns an error with the container's waiting reason if the container has not
// started; otherwise nil.
func waitingError(pod *corev1.Pod, name string) error {
	all := slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses,
		pod.Status.EphemeralContainerStatuses)
	reason := ""
	for i := range all {
		st := &all[i]
		if st.Name != name {
			continue
		}
		if st.State.Waiting == nil || st.LastTerminationState.Terminated != nil {
			return nil
		}
		reason = st.State.Waiting.Reason
	}
	if len(all) == 0 && pod.Status.Phase != corev1.PodPending {
		return nil
	}
	switch reason {
	case "":
		return apierrors.NewBadRequest(fmt.Sprintf("container %q in pod %q is waiting to start: no reason given",
			name, pod.Name))
	case "ErrImagePull", "ImagePullBackOff":
		return apierrors.NewBadRequest(fmt.Sprintf("container %q in pod %q is waiting to start: trying and failing to "+
			"pull image", name, pod.Name))
	}
	return apierrors.NewBadRequest(fmt.Sprintf("container %q in pod %q is waiting to start: %s", name,
		pod.Name, reason))
}
