package apiserver

import (
	"fmt"
	"maps"
	"mime"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// Paths and names of the pages about this process. Access to a page requires the permission to get
// its path. The pages are served as text or as a kind of config.k8s.io.
const (
	pathStatus = "/statusz"
	pathFlags  = "/flagz"

	pageGroup     = "config.k8s.io"
	pageComponent = "apiserver"
)

// statusPage is the kind Statusz of config.k8s.io.
type statusPage struct {
	metav1.TypeMeta  `json:",inline"`
	Metadata         metav1.ObjectMeta `json:"metadata,omitzero"`
	StartTime        metav1.Time       `json:"startTime"`
	UptimeSeconds    int64             `json:"uptimeSeconds"`
	GoVersion        string            `json:"goVersion"`
	BinaryVersion    string            `json:"binaryVersion"`
	EmulationVersion string            `json:"emulationVersion,omitempty"`
	Paths            []string          `json:"paths"`
}

// flagPage is the kind Flagz of config.k8s.io.
type flagPage struct {
	metav1.TypeMeta `json:",inline"`
	Metadata        metav1.ObjectMeta `json:"metadata,omitzero"`
	Flags           map[string]string `json:"flags,omitempty"`
}

// processPages serves the pages about the process of a server.
type processPages struct{ server *Server }

// serveProcessPage serves /statusz and /flagz. It returns false for other paths.
func (p processPages) serveProcessPage(w http.ResponseWriter, r *http.Request) bool {
	switch r.URL.Path {
	case pathStatus:
		p.servePage(w, r, "Statusz", p.statusPage)
	case pathFlags:
		p.servePage(w, r, "Flagz", p.flagPage)
	default:
		return false
	}
	return true
}

func (p processPages) statusPage(meta metav1.TypeMeta) (text string, object any) {
	now := p.server.cfg.Clock()
	status := statusPage{
		TypeMeta: meta, Metadata: metav1.ObjectMeta{Name: pageComponent},
		StartTime:     metav1.NewTime(p.server.lifetime.startedAt.UTC().Truncate(time.Second)),
		UptimeSeconds: int64(now.Sub(p.server.lifetime.startedAt).Seconds()),
		GoVersion:     runtime.Version(), BinaryVersion: p.server.cfg.Process.Version.GitVersion,
		EmulationVersion: p.server.cfg.Process.Version.Major + "." + p.server.cfg.Process.Version.Minor,
		Paths: []string{"/debug/pprof", pathFlags, "/healthz", "/livez", "/metrics", pathSLIs, "/readyz",
			"/version"},
	}
	return fmt.Sprintf("Started: %s\nUp: %s\nGo version: %s\nBinary version: %s\nEmulation version: %s\nPaths: %s\n",
		status.StartTime.Format(time.UnixDate), now.Sub(p.server.lifetime.startedAt).Truncate(time.Second),
		status.GoVersion, status.BinaryVersion, status.EmulationVersion,
		strings.Join(status.Paths, " ")), status
}

func (p processPages) flagPage(meta metav1.TypeMeta) (text string, object any) {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(p.server.cfg.Process.Flags)) {
		fmt.Fprintf(&b, "%s: %s\n", name, p.server.cfg.Process.Flags[name])
	}
	return b.String(), flagPage{TypeMeta: meta, Metadata: metav1.ObjectMeta{Name: pageComponent},
		Flags: p.server.cfg.Process.Flags}
}

func (p processPages) servePage(
	w http.ResponseWriter, r *http.Request, kind string, page func(metav1.TypeMeta) (string, any),
) {
	media, meta, ok := pageForm(r.Header.Get("Accept"), kind)
	if !ok {
		p.server.resources.WriteError(w, r, newStatus(http.StatusNotAcceptable,
			metav1.StatusReasonNotAcceptable, fmt.Sprintf(
				"only the following media types are accepted: text/plain, and application/json or "+
					"application/yaml with "+
					";as=%s;v=v1beta1;g=%s", kind, pageGroup)))
		return
	}
	text, object := page(meta)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	switch media {
	case "application/json":
		writeJSON(w, object)
	case "application/yaml":
		data, err := yaml.Marshal(object)
		p.server.writeDocument(w, r, media, data, err)
	default:
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprintf(w, "\n%s %s\nWarning: This endpoint is not meant to be machine parseable, "+
			"has no formatting compatibility guarantees and is for debugging purposes only.\n\n%s", pageComponent,
			strings.ToLower(kind), text)
	}
}

// pageForm returns the first media type in the Accept header that the page supports. For JSON and
// YAML, meta is the requested kind of config.k8s.io. ok is false if no media type is supported.
func pageForm(accept, kind string) (media string, meta metav1.TypeMeta, ok bool) {
	if strings.TrimSpace(accept) == "" {
		return "text/plain", meta, true
	}
	for clause := range strings.SplitSeq(accept, ",") {
		media, params, err := mime.ParseMediaType(clause)
		if err != nil {
			continue
		}
		switch media {
		case "*/*", "text/*", "text/plain":
			if params["as"] == "" {
				return "text/plain", meta, true
			}
		case "application/json", "application/yaml":
			if v := params["v"]; params["as"] == kind && params["g"] == pageGroup &&
				(v == "v1beta1" || v == "v1alpha1") {
				return media, metav1.TypeMeta{APIVersion: pageGroup + "/" + v, Kind: kind}, true
			}
		}
	}
	return "", meta, false
}
