package server

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"gopkg.in/natefinch/lumberjack.v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver/audit"
	"keelson.dev/keelson/controlplane/nodegateway"
)

// AuditOptions say what of the API's requests is recorded, and where.
type AuditOptions struct {
	PolicyFile string // "" = every request that changes something or was refused, without bodies
	LogPath    string // "" = audit/audit.log in the data folder; "-" = standard output
	MaxSize    int    // megabytes of a file before the next one is begun
	MaxBackups int    // how many older files are kept; 0 = all
	MaxAge     int    // days for which older files are kept; 0 = for ever
	Mode       string // AuditBatch or AuditStrict
}

// The modes of the audit log.
const (
	AuditBatch  = "batch"           // no request waits for the log; what it cannot take is counted
	AuditStrict = "blocking-strict" // a request that cannot be recorded is refused
)

// auditFolder is below the data folder.
const auditFolder = "audit"

// DefaultAudit bounds the log to about 600 MB.
func DefaultAudit() AuditOptions {
	return AuditOptions{MaxSize: 100, MaxBackups: 5, MaxAge: 30, Mode: AuditBatch}
}

// check names the flag that is wrong.
func (o AuditOptions) check() error {
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
	if o.Mode != AuditBatch && o.Mode != AuditStrict {
		return fmt.Errorf("--audit-log-mode %q: want %s or %s", o.Mode, AuditBatch, AuditStrict)
	}
	return nil
}

// wireAudit builds the record of requests; its log runs as a part of the replica.
func (r *Replica) wireAudit() (*audit.Auditor, error) {
	o := r.cfg.Audit
	if o == (AuditOptions{}) {
		o = DefaultAudit()
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	policy, err := audit.LoadPolicy(o.PolicyFile)
	if err != nil {
		return nil, err
	}
	if o.LogPath == "" {
		o.LogPath = filepath.Join(r.cfg.DataDir, auditFolder, "audit.log")
	}
	var out io.Writer = os.Stdout
	if o.LogPath != "-" {
		if err := os.MkdirAll(filepath.Dir(o.LogPath), 0o700); err != nil {
			return nil, fmt.Errorf("making the folder of the audit log: %w", err)
		}
		out = &lumberjack.Logger{Filename: o.LogPath, MaxSize: o.MaxSize, MaxBackups: o.MaxBackups, MaxAge: o.MaxAge}
	}
	r.auditLog = audit.NewLog(out, o.Mode == AuditStrict, r.log.With("part", "audit"))
	if o.Mode == AuditStrict {
		policy.Received()
	}
	r.auditor = audit.New(policy, r.auditLog, time.Now)
	return r.auditor, nil
}

// auditJoins records who asks at the agents' port to be let in.
func (r *Replica) auditJoins(a nodegateway.Asked) (func(nodegateway.Answered), error) {
	_, record := r.auditor.Begin(context.Background(), audit.Origin{URI: a.Method, Source: a.Source, Received: a.Received})
	if a.Token != "" {
		record.Annotate("audit.keelson.dev/join-token", a.Token)
	}
	err := record.Asked(audit.Attributes{
		User: a.User, Sender: a.User, Verb: a.Verb, Group: a.Group, Resource: a.Resource, Subresource: a.Subresource, Name: a.Name,
		Version: "v1", Changes: true,
	})
	if err != nil {
		return nil, err
	}
	return func(got nodegateway.Answered) {
		if got.Reason != "" {
			record.Annotate("audit.keelson.dev/reason", got.Reason)
		}
		code := http.StatusCreated
		if got.Err != nil {
			s := status.Convert(got.Err)
			code = httpCode(s.Code())
			record.Refused(&metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReason(s.Code().String()),
				Message: s.Message()})
		}
		record.Done(code, false)
	}, nil
}

// httpCode is what the API would have answered.
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
