package endpoints

import (
	"fmt"
	"mime"
	"net/http"
	"sort"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// Media types in which objects are sent and received.
const (
	mediaJSON  = "application/json"
	mediaYAML  = "application/yaml"
	mediaProto = "application/vnd.kubernetes.protobuf"
	mediaCBOR  = "application/cbor"
	// CBOR sequence, the media type of a watch in CBOR. Clients may also request a watch as
	// mediaCBOR.
	mediaCBORSeq = "application/cbor-seq"
)

// View is the representation of objects that a client requests in the parameter "as" of the Accept
// header.
type View string

// The views: whole objects, rows of a table, or metadata only.
const (
	viewObject   View = ""
	viewTable    View = "Table"
	viewPartial  View = "PartialObjectMetadata"
	viewPartials View = "PartialObjectMetadataList"
)

// Format is the media type and view that were negotiated for a response.
type Format struct {
	Media   string
	As      View
	Version string // version of the view: "v1" or "v1beta1"
	Pretty  bool

	sequence bool // a CBOR sequence was requested, which only a watch can be
}

// Negotiate returns the supported format that the Accept header of a request prefers. If no format
// is supported, it returns a 406 error.
func Negotiate(r *http.Request) (Format, error) {
	return negotiateFormat(r, func(Format) bool { return true }, mediaJSON, mediaYAML, mediaProto, mediaCBOR)
}

// negotiateFor is like Negotiate for a response to req. It skips formats in which this response
// cannot be encoded.
func negotiateFor(r *http.Request, req *api.Request) (Format, error) {
	k, watching := req.Kind, req.Verb == api.VerbWatch
	proto := k.Type.Ops.Protobuf || k.Serving.Virtual
	if sub := k.Subresources[req.Subresource]; sub != nil && sub.New != nil {
		proto = true
	}
	media := []string{mediaJSON}
	if !watching {
		media = append(media, mediaYAML)
	}
	switch {
	case proto && watching:
		media = append(media, mediaProto+";stream=watch")
	case proto:
		media = append(media, mediaProto)
	}
	if watching {
		media = append(media, mediaCBORSeq)
	} else {
		media = append(media, mediaCBOR)
	}
	return negotiateFormat(r, func(f Format) bool {
		switch {
		case f.Media == mediaYAML:
			return !watching
		case f.Media == mediaProto:
			return f.As != viewTable && (proto || f.As != viewObject)
		case f.sequence:
			return watching
		}
		return true
	}, media...)
}

// negotiateFormat returns the format that the Accept header prefers among those for which supports
// returns true. media lists the supported media types for the 406 error.
func negotiateFormat(r *http.Request, supports func(Format) bool, media ...string) (Format, error) {
	pretty := wantsPretty(r)
	var header string
	if values := r.Header.Values("Accept"); len(values) == 1 {
		header = values[0]
	} else {
		header = strings.Join(values, ",")
	}
	switch header { // the most frequent headers need no parsing
	case "", mediaJSON:
		return Format{Media: mediaJSON, Pretty: pretty}, nil
	case mediaProto, mediaProto + "," + mediaJSON:
		if f := (Format{Media: mediaProto, Pretty: pretty}); supports(f) {
			return f, nil
		}
	}
	for _, c := range parseAccept(header) {
		f, ok := parseFormat(c)
		if ok && supports(f) {
			f.Pretty, f.sequence = pretty, false
			return f, nil
		}
	}
	return Format{}, notAcceptable(media...)
}

func notAcceptable(types ...string) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusNotAcceptable, Reason: metav1.StatusReasonNotAcceptable,
		Message: "only the following media types are accepted: " + strings.Join(types, ", "),
	}}
}

func unsupportedMedia(types ...string) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusUnsupportedMediaType,
		Reason: metav1.StatusReasonUnsupportedMediaType,
		Message: "the body of the request was in an unknown format - accepted media types include: " +
			strings.Join(types, ", "),
	}}
}

// Clause is one media type of an Accept header.
type Clause struct {
	Media  string
	Params map[string]string
	q      float64
}

// AcceptedClauses returns the media types of the Accept header, in the order of the client's
// preference.
func AcceptedClauses(r *http.Request) []Clause {
	return parseAccept(strings.Join(r.Header.Values("Accept"), ","))
}

// parseAccept returns the clauses of an Accept header in the order of preference. It skips clauses
// that it cannot parse.
func parseAccept(header string) []Clause {
	var out []Clause
	for part := range strings.SplitSeq(header, ",") {
		media, params, err := mime.ParseMediaType(strings.TrimSpace(part))
		if err != nil {
			continue
		}
		c := Clause{Media: media, Params: params, q: 1}
		if q, err := strconv.ParseFloat(params["q"], 64); err == nil {
			c.q = q
		}
		if c.q > 0 {
			out = append(out, c)
		}
	}
	sort.SliceStable(out, func(i, j int) bool { return out[i].q > out[j].q })
	return out
}

func parseFormat(c Clause) (Format, bool) {
	var f Format
	switch c.Media {
	case mediaJSON, "*/*", "application/*":
		f.Media = mediaJSON
	case mediaYAML, "application/x-yaml", "text/yaml":
		f.Media = mediaYAML
	case mediaProto:
		f.Media = mediaProto
	case mediaCBOR, mediaCBORSeq:
		f.Media, f.sequence = mediaCBOR, c.Media == mediaCBORSeq
	default:
		return f, false
	}
	as, asked := c.Params["as"]
	if !asked {
		return f, true
	}
	if g := c.Params["g"]; g != metav1.GroupName {
		return f, false
	}
	f.Version = c.Params["v"]
	if f.Version != "v1" && f.Version != "v1beta1" {
		return f, false
	}
	switch f.As = View(as); f.As {
	case viewTable, viewPartial, viewPartials:
		return f, true
	}
	return f, false
}

// wantsPretty reports whether the response is to be indented. The pretty parameter decides. Without
// the parameter, it reports whether the client is a browser, curl or wget.
func wantsPretty(r *http.Request) bool {
	if strings.Contains(r.URL.RawQuery, "pretty") {
		if v, ok := r.URL.Query()["pretty"]; ok {
			b, err := strconv.ParseBool(v[0])
			return v[0] == "" || err == nil && b
		}
	}
	agent := r.UserAgent()
	return strings.HasPrefix(agent, "curl") || strings.HasPrefix(agent, "Wget") ||
		strings.HasPrefix(agent, "Mozilla/5.0")
}

// contentType returns the media type of the request body; the default is JSON. An unsupported type
// is a 415 error.
func contentType(r *http.Request) (string, error) {
	h := r.Header.Get("Content-Type")
	if h == "" {
		return mediaJSON, nil
	}
	media, _, err := mime.ParseMediaType(h)
	if err != nil {
		return "", apierrors.NewBadRequest(fmt.Sprintf("the Content-Type %q cannot be parsed: %v", h, err))
	}
	switch media {
	case mediaJSON, mediaYAML, mediaProto, mediaCBOR:
		return media, nil
	case "application/x-yaml", "text/yaml":
		return mediaYAML, nil
	}
	return "", unsupportedMedia(mediaJSON, mediaYAML, mediaProto, mediaCBOR)
}
