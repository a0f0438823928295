package stream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"keelson.dev/keelson/controlplane/api"
)

// wanted is the set of streams that an exec or attach request uses.
type wanted struct{ stdin, stdout, stderr, tty bool }

// session is the client side of an exec or attach session, over SPDY or a WebSocket.
type session struct {
	stdin  io.Reader
	stdout io.Writer
	stderr io.Writer
	resize io.Reader // JSON values of TermSize; nil without a terminal
	// report sends the final status of the session to the client.
	report func(s metav1.Status)
	// gone is closed when the client has disconnected.
	gone  <-chan struct{}
	close func()
}

// openStreams is the time in which a client must open all streams of its request.
const openStreams = 30 * time.Second

// exec runs a command in a container, or attaches to its process. An error is returned only before
// the connection is upgraded; later errors are reported to the client as the final status.
func (s *Server) exec(w http.ResponseWriter, r *http.Request, pod *corev1.Pod, want wanted, er api.ExecRequest) error {
	attach := er.Attach
	er.PodUID, er.Namespace, er.Pod, er.TTY = pod.UID, pod.Namespace, pod.Name, want.tty
	if want.tty {
		want.stderr = false // a terminal has a single output stream
	}
	var err error
	if er.Container, err = container(pod, er.Container); err != nil {
		return err
	}
	switch {
	case !attach && len(er.Command) == 0:
		return apierrors.NewBadRequest("you must specify at least one command to run in the container")
	case !want.stdin && !want.stdout && !want.stderr:
		return apierrors.NewBadRequest("you must specify at least 1 of stdin, stdout, stderr")
	case pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed:
		return apierrors.NewBadRequest(fmt.Sprintf("cannot exec into a container in a completed pod; current phase is %s", pod.Status.Phase))
	case !httpstream.IsUpgradeRequest(r):
		return apierrors.NewBadRequest("Upgrade request required")
	}
	var ses *session
	if wsstream.IsWebSocketRequest(r) {
		ses, err = webSocketSession(w, r, want)
	} else {
		ses, err = spdySession(w, r, want)
	}
	if err != nil {
		s.Log.Debug("exec was not begun", "pod", pod.Namespace+"/"+pod.Name, "err", err)
		return nil // the client has received an error response
	}
	defer ses.close()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	go func() {
		select {
		case <-ses.gone:
			cancel()
		case <-ctx.Done():
		}
	}()
	ses.report(outcome(s.Nodes.Exec(ctx, pod.Spec.NodeName, er, ses.streams(ctx))))
	return nil
}

func (ses *session) streams(ctx context.Context) api.Streams {
	st := api.Streams{Stdin: ses.stdin, Stdout: ses.stdout, Stderr: ses.stderr}
	if ses.resize != nil {
		sizes := make(chan api.TermSize)
		go pumpSizes(ctx, ses.resize, sizes)
		st.Resize = sizes
	}
	return st
}

func pumpSizes(ctx context.Context, from io.Reader, to chan<- api.TermSize) {
	defer close(to)
	for dec := json.NewDecoder(from); ; {
		var size api.TermSize
		if dec.Decode(&size) != nil {
			return
		}
		select {
		case to <- size:
		case <-ctx.Done():
			return
		}
	}
}

// outcome returns the final Status of an exec session that ended with err.
func outcome(err error) metav1.Status {
	var exit *api.ExitError
	switch {
	case err == nil:
		return metav1.Status{Status: metav1.StatusSuccess}
	case errors.As(err, &exit):
		return metav1.Status{
			Status: metav1.StatusFailure, Reason: "NonZeroExitCode",
			Message: fmt.Sprintf("command terminated with non-zero exit code: %v", err),
			Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: "ExitCode", Message: strconv.Itoa(exit.Code)}}},
		}
	}
	return apierrors.NewInternalError(fmt.Errorf("error executing command in container: %w", err)).ErrStatus
}
