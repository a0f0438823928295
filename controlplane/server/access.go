package server

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	authnfile "keelson.dev/keelson/controlplane/apiserver/authn/config"
	authzfile "keelson.dev/keelson/controlplane/apiserver/authz/config"
)

// wireAccess reads what files and flags say of authentication and authorization; own is the issuer of this cluster's
// service account tokens, for whom no other may stand. The files are followed by parts of the replica.
func (r *Replica) wireAccess(own string) (err error) {
	compilers := r.expressions
	r.authentication, err = authnfile.Load(authnfile.Config{
		Options: r.cfg.Authentication, Compilers: compilers, Audiences: []string{own}, Disallowed: []string{own},
		Clock: time.Now, Log: r.log.With("part", "authentication"),
	})
	if err != nil {
		return err
	}
	r.authorization, err = authzfile.Load(authzfile.Config{
		Options: r.cfg.Authorization, Compilers: compilers, Clock: time.Now, Log: r.log.With("part", "authorization"),
	})
	if err != nil {
		return err
	}
	r.reloads = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "keelson_access_configuration_reloads_total",
		Help: "How often files of authentication or authorization changed, and whether they were taken over.",
	}, []string{"part", "status"})
	count := func(part string) func(bool) {
		return func(ok bool) {
			status := "failure"
			if ok {
				status = "success"
			}
			r.reloads.WithLabelValues(part, status).Inc()
		}
	}
	r.authentication.OnReload(count("authentication"))
	r.authorization.OnReload(count("authorization"))
	return nil
}
