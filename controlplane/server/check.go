package server

import (
	"errors"
	"log/slog"
	"time"

	"keelson.dev/keelson/controlplane/apiserver/audit"
	authnfile "keelson.dev/keelson/controlplane/apiserver/authn/config"
	authzfile "keelson.dev/keelson/controlplane/apiserver/authz/config"
	"keelson.dev/keelson/controlplane/apiserver/cel"
	"keelson.dev/keelson/controlplane/apiserver/podsecurity"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/scheduler"
)

// Check says all that Run would refuse of a replica's settings, naming the flag, and of the files that they name, those that are not
// there as well. Nobody is asked whom these name: no network is needed. In the data folder it looks for the address alone, where the
// settings have none, and nothing is changed.
func Check(cfg Config) error {
	cfg, unknown := cfg.addressed()
	_, placing := scheduler.LoadConfig(cfg.SchedulerConfig)
	_, security := podsecurity.Load(cfg.AdmissionConfig)
	_, policy := audit.LoadPolicy(cfg.Audit.PolicyFile)
	return errors.Join(unknown, cfg.check(), cfg.Audit.check(), placing, security, policy, cfg.checkAccess(), cfg.checkKeys())
}

// checkAccess reads what wireAccess does, and lets go of it.
func (c Config) checkAccess() error {
	compilers, own, log := cel.New(), []string{pki.DefaultIssuer}, slog.New(slog.DiscardHandler)
	_, who := authnfile.Load(authnfile.Config{
		Options: c.Authentication, Compilers: compilers, Audiences: own, Disallowed: own, Clock: time.Now, Log: log,
	})
	_, what := authzfile.Load(authzfile.Config{Options: c.Authorization, Compilers: compilers, Clock: time.Now, Log: log})
	return errors.Join(who, what)
}

// checkKeys reads the key file that an operator keeps. That of the data folder is the replica's own.
func (c Config) checkKeys() error {
	if c.Store.Keys == datadir.NoKeys {
		return nil
	}
	_, err := c.Store.Keyring()
	return err
}
