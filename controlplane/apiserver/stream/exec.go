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

// wantedStreams is the set of streams that the client of an exec or attach request wants to use.
type wantedStreams struct{ stdin, stdout, stderr, tty bool }

// session is the API server's connection to the client of an exec or attach request, over SPDY or a
// WebSocket.
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

// openStreamsTimeout is the time limit within which a client must open all streams of its request.
// A stream of a port-forward must get its counterpart within this time.
const openStreamsTimeout = 30 * time.Second

// serveExec runs a command in a container, or attaches to the container's process. It returns an
// error only before the connection is upgraded; later errors are sent to the client as the final
// status.
func (s *Server) serveExec(
	w http.ResponseWriter, r *http.Request, pod *corev1.Pod, streams wantedStreams, er api.ExecRequest,
) error {
	attach := er.Attach
	er.PodUID, er.Namespace, er.Pod, er.TTY = pod.UID, pod.Namespace, pod.Name, streams.tty
	if streams.tty {
		streams.stderr = false // a terminal has a single output stream
	}
	var err error
	if er.Container, err = resolveContainer(pod, er.Container); err != nil {
		return err
	}
	switch {
	case !attach && len(er.Command) == 0:
		return apierrors.NewBadRequest("you must specify at least one command to run in the container")
	case !streams.stdin && !streams.stdout && !streams.stderr:
		return apierrors.NewBadRequest("you must specify at least 1 of stdin, stdout, stderr")
	case api.IsPodTerminal(pod):
		return apierrors.NewBadRequest(fmt.Sprintf("cannot exec into a container in a completed pod; current phase "+
			"is %s", pod.Status.Phase))
	case !httpstream.IsUpgradeRequest(r):
		return apierrors.NewBadRequest("Upgrade request required")
	}
	var ses *session
	if wsstream.IsWebSocketRequest(r) {
		ses, err = webSocketSession(w, r, streams)
	} else {
		ses, err = spdySession(w, r, streams)
	}
	if err != nil {
		s.Log.Debug("failed to start exec", "pod", pod.Namespace+"/"+pod.Name, "err", err)
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
	ses.report(finalStatus(s.Nodes.Exec(ctx, pod.Spec.NodeName, er, ses.sessionStreams(ctx))))
	return nil
}

func (ses *session) sessionStreams(ctx context.Context) api.Streams {
	st := api.Streams{Stdin: ses.stdin, Stdout: ses.stdout, Stderr: ses.stderr}
	if ses.resize != nil {
		sizes := make(chan api.TermSize)
		go pumpSizes(ctx, ses.resize, sizes)
		st.Resize = sizes
	}
	return st
}

func pumpSizes(ctx context.Context, reader io.Reader, sizes chan<- api.TermSize) {
	defer close(sizes)
	for dec := json.NewDecoder(reader); ; {
		var size api.TermSize
		if dec.Decode(&size) != nil {
			return
		}
		select {
		case sizes <- size:
		case <-ctx.Done():
			return
		}
	}
}

// finalStatus returns the final Status of an exec session that ended with err.
func finalStatus(err error) metav1.Status {
	var exit *api.ExitError
	switch {
	case err == nil:
		return metav1.Status{Status: metav1.StatusSuccess}
	case errors.As(err, &exit):
		return metav1.Status{
			Status: metav1.StatusFailure, Reason: "NonZeroExitCode",
			Message: fmt.Sprintf("command terminated with non-zero exit code: %v", err),
			Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: "ExitCode",
				Message: strconv.Itoa(exit.Code)}}},
		}
	}
	return apierrors.NewInternalError(fmt.Errorf("error executing command in container: %w", err)).ErrStatus
}
