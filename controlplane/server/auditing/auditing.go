// Package auditing configures the audit log. It also records operations that are not requests to
// the API.
package auditing

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"gopkg.in/natefinch/lumberjack.v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/audit"
	"keelson.dev/keelson/controlplane/nodegateway/accept"
)

// Options configure which requests are recorded, and the files of the log.
type Options struct {
	PolicyFile string // empty: every request that changes something or was refused, without bodies
	LogPath    string // empty: audit/audit.log in the data directory; "-": standard output
	MaxSize    int    // maximum size of a file in megabytes
	MaxBackups int    // number of old files that are kept; 0 means all
	MaxAge     int    // number of days for which old files are kept; 0 means forever
	Mode       string // Batch or Strict
}

// The modes of the audit log.
const (
	Batch  = "batch"           // requests do not wait for the log; lost records are counted
	Strict = "blocking-strict" // a request that cannot be recorded is refused
)

// folder is the name of the directory of audit logs in the data directory.
const folder = "audit"

// Default returns the default options. They limit the log to about 600 MB.
func Default() Options {
	return Options{MaxSize: 100, MaxBackups: 5, MaxAge: 30, Mode: Batch}
}

// Check returns an error if an option is invalid. The error names its flag.
func (o Options) Check() error {
	for _, f := range []struct {
		flag  string
		value int
		least int
	}{{"--audit-log-maxsize", o.MaxSize, 1}, {"--audit-log-maxbackup", o.MaxBackups,
		0}, {"--audit-log-maxage", o.MaxAge, 0}} {
		if f.value < f.least {
			return fmt.Errorf("%s %d: want %d or more", f.flag, f.value, f.least)
		}
	}
	if o.Mode != Batch && o.Mode != Strict {
		return fmt.Errorf("--audit-log-mode %q: want %s or %s", o.Mode, Batch, Strict)
	}
	return nil
}

// New returns the audit log and the auditor that records API requests in it. The caller must run
// the log. The zero value of o means Default().
func New(o Options, dataDir string, log *slog.Logger) (*audit.Log, *audit.Auditor, error) {
	if o == (Options{}) {
		o = Default()
	}
	if err := o.Check(); err != nil {
		return nil, nil, err
	}
	policy, err := audit.LoadPolicy(o.PolicyFile)
	if err != nil {
		return nil, nil, err
	}
	if o.LogPath == "" {
		o.LogPath = filepath.Join(dataDir, folder, "audit.log")
	}
	var out io.Writer = os.Stdout
	if o.LogPath != "-" {
		if err := os.MkdirAll(filepath.Dir(o.LogPath), 0o700); err != nil {
			return nil, nil, fmt.Errorf("creating the directory of the audit log: %w", err)
		}
		out = &lumberjack.Logger{Filename: o.LogPath, MaxSize: o.MaxSize, MaxBackups: o.MaxBackups, MaxAge: o.MaxAge}
	}
	records := audit.NewLog(out, o.Mode == Strict, log)
	if o.Mode == Strict {
		policy.Received()
	}
	return records, audit.New(policy, records, time.Now), nil
}

// RecordJoin records a request to join the cluster, which was sent to the port for agents. The
// returned function records the result of the request.
func RecordJoin(auditor *audit.Auditor, a accept.AuditRequest) (func(accept.AuditResult), error) {
	_, record := auditor.Begin(context.Background(),
		audit.Origin{URI: a.Method, Source: a.Source, Received: a.Received})
	if a.Token != "" {
		record.Annotate("audit.keelson.dev/join-token", a.Token)
	}
	err := record.SetRequest(audit.Attributes{
		User: a.User, Sender: a.User, Verb: a.Verb, Group: a.Group, Resource: a.Resource,
		Subresource: a.Subresource, Name: a.Name,
		Version: "v1", Changes: true,
	})
	if err != nil {
		return nil, err
	}
	return func(got accept.AuditResult) {
		if got.Reason != "" {
			record.Annotate("audit.keelson.dev/reason", got.Reason)
		}
		code := http.StatusCreated
		if got.Err != nil {
			s := status.Convert(got.Err)
			code = httpCode(s.Code())
			record.SetStatus(&metav1.Status{Status: metav1.StatusFailure,
				Reason:  metav1.StatusReason(s.Code().String()),
				Message: s.Message()})
		}
		record.Finish(code, false)
	}, nil
}

// httpCode returns the HTTP status code that corresponds to a gRPC status code.
func httpCode(c codes.Code) int {
	switch c {
	case codes.Unauthenticated:
		return http.StatusUnauthorized
	case codes.PermissionDenied:
		return http.StatusForbidden
	case codes.InvalidArgument:
		return http.StatusBadRequest
	case codes.ResourceExhausted:
		return http.StatusTooManyRequests
	case codes.Unavailable:
		return http.StatusServiceUnavailable
	case codes.Unimplemented:
		return http.StatusNotImplemented
	}
	return http.StatusInternalServerError
}

// RecordRemoval records the removal of the dead replica called name, as a request of user. failure
// is the error of the removal, or nil.
func RecordRemoval(auditor *audit.Auditor, user, name, reason string, failure error) {
	caller, path := api.User{Name: user}, api.PathClusterMembers+"/"+name
	_, record := auditor.Begin(context.Background(), audit.Origin{URI: path, Received: time.Now()})
	record.Annotate("audit.keelson.dev/reason", reason)
	_ = record.SetRequest(audit.Attributes{User: caller, Sender: caller, Verb: "delete", Path: path, Changes: true})
	code := http.StatusOK
	if failure != nil {
		code = http.StatusInternalServerError
		record.SetStatus(&metav1.Status{Status: metav1.StatusFailure, Message: failure.Error()})
	}
	record.Finish(code, false)
}
