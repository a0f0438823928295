package server

import (
	"errors"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"keelson.dev/keelson/controlplane/apiserver/audit"
	authnfile "keelson.dev/keelson/controlplane/apiserver/authn/config"
	authzfile "keelson.dev/keelson/controlplane/apiserver/authz/config"
	"keelson.dev/keelson/controlplane/apiserver/cel"
	"keelson.dev/keelson/controlplane/apiserver/podsecurity"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/scheduler"
)

// wireAccess loads the files that configure authentication and authorization. The files are
// reloaded when they change, while the replica runs. issuer is the issuer of this cluster's service
// account tokens; a configured OIDC issuer with the same URL is an error.
func (r *Replica) wireAccess(issuer string) (err error) {
	compilers := r.api.compilers
	r.api.authentication, err = authnfile.Load(authnfile.Config{
		Options: r.cfg.Access.Authentication, Compilers: compilers,
		Audiences: []string{issuer}, Disallowed: []string{issuer},
		Clock: time.Now, Log: r.log.With("part", "authentication"),
	})
	if err != nil {
		return err
	}
	r.api.authorization, err = authzfile.Load(authzfile.Config{
		Options: r.cfg.Access.Authorization, Compilers: compilers, Clock: time.Now,
		Log: r.log.With("part", "authorization"),
	})
	if err != nil {
		return err
	}
	r.api.reloads = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "keelson_access_configuration_reloads_total",
		Help: "Number of reloads of changed authentication and authorization files, by result.",
	}, []string{"part", "status"})
	count := func(part string) func(bool) {
		return func(ok bool) {
			status := "failure"
			if ok {
				status = "success"
			}
			r.api.reloads.WithLabelValues(part, status).Inc()
		}
	}
	r.api.authentication.OnReload(count("authentication"))
	r.api.authorization.OnReload(count("authorization"))
	return nil
}

// Check validates the settings of a replica without running it. It returns the errors that Run
// would return for the settings; each error names its flag. It also returns errors for configured
// files that are missing or invalid. It uses no network and changes nothing. If cfg has no address,
// Check reads the last address from the data directory.
func Check(cfg Config) error {
	cfg, addressErr := cfg.withAddress()
	_, schedulerErr := scheduler.LoadConfig(cfg.Leader.SchedulerConfig)
	_, admissionErr := podsecurity.Load(cfg.Admission.ConfigFile)
	_, auditErr := audit.LoadPolicy(cfg.Access.Audit.PolicyFile)
	return errors.Join(addressErr, cfg.checkSettings(), cfg.Access.Audit.Check(), schedulerErr, admissionErr, auditErr,
		cfg.checkAccess(),
		cfg.checkKeys())
}

// checkAccess returns the errors of the files that configure authentication and authorization. It
// loads them as wireAccess does, and discards the result.
func (c Config) checkAccess() error {
	compilers, own, log := cel.New(), []string{pki.DefaultIssuer}, slog.New(slog.DiscardHandler)
	_, authnErr := authnfile.Load(authnfile.Config{
		Options: c.Access.Authentication, Compilers: compilers, Audiences: own, Disallowed: own,
		Clock: time.Now, Log: log,
	})
	_, authzErr := authzfile.Load(authzfile.Config{Options: c.Access.Authorization, Compilers: compilers,
		Clock: time.Now, Log: log})
	return errors.Join(authnErr, authzErr)
}

// checkKeys reads the key file of --encryption-keys and returns the error. It does not check the
// key file in the data directory, which the replica maintains itself.
func (c Config) checkKeys() error {
	if c.Store.Keys == datadir.NoKeys {
		return nil
	}
	_, err := c.Store.Keyring()
	return err
}
