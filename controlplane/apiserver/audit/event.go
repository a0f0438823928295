// Package audit keeps the record of who asked the API for what, and what came of
// it. What is recorded, and how much of it, is said by a policy of
// audit.k8s.io/v1; records are JSON lines of the same group's Event, so that the
// tools that read Kubernetes' audit log read this one. Without a policy every
// request that changes something and every one that was refused has a record
// without bodies.
//
// The types are written down here and not linked from k8s.io/apiserver: that
// module brings its whole server's dependencies into the build.
package audit

import (
	"encoding/json"
	"strings"
	"unicode/utf8"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Group is the API group and version of events and policies.
const groupVersion = "audit.k8s.io/v1"

// Level is how much of a request is recorded.
type Level string

// The levels, each with all of the one before it.
const (
	LevelNone            Level = "None"
	LevelMetadata        Level = "Metadata"
	LevelRequest         Level = "Request"
	LevelRequestResponse Level = "RequestResponse"
)

var levels = []Level{LevelNone, LevelMetadata, LevelRequest, LevelRequestResponse}

// Stage is the moment of a request at which an event was made.
type Stage string

// The stages in their order. ResponseStarted is that of watches and byte streams.
const (
	StageRequestReceived  Stage = "RequestReceived"
	StageResponseStarted  Stage = "ResponseStarted"
	StageResponseComplete Stage = "ResponseComplete"
	StagePanic            Stage = "Panic"
)

var stages = []Stage{StageRequestReceived, StageResponseStarted, StageResponseComplete, StagePanic}

// Event is one line of the log.
type Event struct {
	Kind       string `json:"kind"`
	APIVersion string `json:"apiVersion"`
	Level      Level  `json:"level"`
	AuditID    string `json:"auditID"`
	Stage      Stage  `json:"stage"`
	RequestURI string `json:"requestURI"`
	Verb       string `json:"verb"`
	// User is who sent the request; ImpersonatedUser is as whom it was performed, where that is another.
	User             authenticationv1.UserInfo  `json:"user"`
	ImpersonatedUser *authenticationv1.UserInfo `json:"impersonatedUser,omitempty"`
	SourceIPs        []string                   `json:"sourceIPs,omitempty"`
	UserAgent        string                     `json:"userAgent,omitempty"`
	ObjectRef        *ObjectReference           `json:"objectRef,omitempty"`
	ResponseStatus   *metav1.Status             `json:"responseStatus,omitempty"`
	RequestObject    json.RawMessage            `json:"requestObject,omitempty"`
	ResponseObject   json.RawMessage            `json:"responseObject,omitempty"`
	Received         metav1.MicroTime           `json:"requestReceivedTimestamp"`
	Stamp            metav1.MicroTime           `json:"stageTimestamp"`
	Annotations      map[string]string          `json:"annotations,omitempty"`
}

// ObjectReference is what a request was about.
type ObjectReference struct {
	Resource        string `json:"resource,omitempty"`
	Namespace       string `json:"namespace,omitempty"`
	Name            string `json:"name,omitempty"`
	UID             string `json:"uid,omitempty"`
	APIGroup        string `json:"apiGroup,omitempty"`
	APIVersion      string `json:"apiVersion,omitempty"`
	ResourceVersion string `json:"resourceVersion,omitempty"`
	Subresource     string `json:"subresource,omitempty"`
}

// How much of what clients chose stands in a record.
const (
	longURI     = 2048
	longName    = 253
	longAgent   = 256
	longMessage = 1024
	longNote    = 2048
	manyGroups  = 64
	manyExtra   = 16
)

// clip cuts a text to n bytes at the border of a rune.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return strings.Clone(s[:n]) + "..."
}

func clipAll(list []string, many, long int) []string {
	fits := len(list) <= many
	for i := 0; fits && i < len(list); i++ {
		fits = len(list[i]) <= long
	}
	if fits {
		return list
	}
	out := make([]string, 0, min(len(list), many))
	for _, s := range list[:min(len(list), many)] {
		out = append(out, clip(s, long))
	}
	return out
}
