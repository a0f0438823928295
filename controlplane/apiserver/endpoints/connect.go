package endpoints

import (
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
)

func (h *Handler) serveConnect(w http.ResponseWriter, r *http.Request, req *api.Request) {
	options, err := connectOptions(req, r.URL.Query())
	if err != nil {
		h.WriteError(w, r, err)
		return
	}
	req.Object = options
	obj, err := h.cfg.Backend.Connect(r.Context(), req)
	if err != nil {
		h.WriteError(w, r, err)
		return
	}
	h.cfg.Streams.ServeStream(w, r, req, obj)
}

// connectOptions returns the options object of a connect request, which admission checks. It is nil
// for logs, because in Kubernetes reading a log is not a connect request.
func connectOptions(req *api.Request, q url.Values) (runtime.Object, error) {
	flag := func(name string) bool { // as in Kubernetes: a parameter that is present and not "false" or "0" is true
		v := q.Get(name)
		return q.Has(name) && v != "0" && !strings.EqualFold(v, "false")
	}
	var out runtime.Object
	switch req.Subresource {
	case "exec":
		out = &corev1.PodExecOptions{Stdin: flag("stdin"), Stdout: flag("stdout"), Stderr: flag("stderr"),
			TTY:       flag("tty"),
			Container: q.Get("container"), Command: slices.Clone(q["command"])}
	case "attach":
		out = &corev1.PodAttachOptions{Stdin: flag("stdin"), Stdout: flag("stdout"), Stderr: flag("stderr"),
			TTY:       flag("tty"),
			Container: q.Get("container")}
	case "portforward":
		ports, err := parseForwardPorts(q["ports"])
		if err != nil {
			return nil, err
		}
		out = &corev1.PodPortForwardOptions{Ports: ports}
	case "proxy":
		switch req.Kind.Resource {
		case "nodes":
			out = &corev1.NodeProxyOptions{Path: q.Get("path")}
		case "services":
			out = &corev1.ServiceProxyOptions{Path: q.Get("path")}
		default:
			out = &corev1.PodProxyOptions{Path: q.Get("path")}
		}
	default:
		return nil, nil
	}
	if sub := req.Kind.Subresources[req.Subresource]; sub != nil {
		out.GetObjectKind().SetGroupVersionKind(sub.GVK)
	}
	return out, nil
}

// maxForwarded limits the number of ports of a port-forward request.
const maxForwarded = 100

// parseForwardPorts parses the ports parameters of a port-forward request. Each parameter is a
// comma-separated list.
func parseForwardPorts(params []string) ([]int32, error) {
	var out []int32
	for _, list := range params {
		for s := range strings.SplitSeq(list, ",") {
			n, err := strconv.ParseUint(s, 10, 16)
			if err != nil || n == 0 {
				return nil, apierrors.NewBadRequest("query parameter \"ports\" has an invalid value: " +
					strconv.Quote(list))
			}
			if out = append(out, int32(n)); len(out) > maxForwarded {
				return nil, apierrors.NewBadRequest("query parameter \"ports\" contains more than 100 ports")
			}
		}
	}
	return out, nil
}
