// Package audit records each request to the API: its user, its attributes and its result. A policy
// of audit.k8s.io/v1 selects the requests and the level of detail. Records are JSON lines of the
// type Event of audit.k8s.io/v1, so that tools for the audit log of Kubernetes can read them.
// Without a policy file, write requests and rejected requests are recorded, without bodies.
//
// The types are declared here instead of imported from k8s.io/apiserver. That module would add all
// dependencies of its server to the build.
package audit

import (
	"encoding/json"
	"strings"
	"unicode/utf8"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// groupVersion is the API group and version of events and policies.
const groupVersion = "audit.k8s.io/v1"

// Level is the level of detail at which a request is recorded.
type Level string

// The levels; each includes all details of the previous one.
const (
	LevelNone            Level = "None"
	LevelMetadata        Level = "Metadata"
	LevelRequest         Level = "Request"
	LevelRequestResponse Level = "RequestResponse"
)

var levels = []Level{LevelNone, LevelMetadata, LevelRequest, LevelRequestResponse}

// Stage is the stage of request handling at which an event is generated.
type Stage string

// The stages in their order. Only watches and byte streams have ResponseStarted.
const (
	StageRequestReceived  Stage = "RequestReceived"
	StageResponseStarted  Stage = "ResponseStarted"
	StageResponseComplete Stage = "ResponseComplete"
	StagePanic            Stage = "Panic"
)

var stages = []Stage{StageRequestReceived, StageResponseStarted, StageResponseComplete, StagePanic}

// Event is one line of the audit log.
type Event struct {
	Kind       string `json:"kind"`
	APIVersion string `json:"apiVersion"`
	Level      Level  `json:"level"`
	AuditID    string `json:"auditID"`
	Stage      Stage  `json:"stage"`
	RequestURI string `json:"requestURI"`
	Verb       string `json:"verb"`
	// User sent the request. ImpersonatedUser is the user as which the request was performed, if
	// that is a different user.
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

// ObjectReference identifies the object of a request.
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

// Maximum lengths and counts of client-supplied values in an audit event.
const (
	maxURI        = 2048
	maxName       = 253
	maxAgent      = 256
	maxMessage    = 1024
	maxAnnotation = 2048
	maxGroups     = 64
	maxExtra      = 16
)

// clipText truncates s to at most n bytes at a rune boundary and appends "...".
func clipText(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return strings.Clone(s[:n]) + "..."
}

func clipAll(list []string, texts, long int) []string {
	fits := len(list) <= texts
	for i := 0; fits && i < len(list); i++ {
		fits = len(list[i]) <= long
	}
	if fits {
		return list
	}
	out := make([]string, 0, min(len(list), texts))
	for _, s := range list[:min(len(list), texts)] {
		out = append(out, clipText(s, long))
	}
	return out
}
