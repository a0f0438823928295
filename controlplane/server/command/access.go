package command

import (
	"github.com/spf13/cobra"

	authnfile "keelson.dev/keelson/controlplane/apiserver/authn/config"
	authzfile "keelson.dev/keelson/controlplane/apiserver/authz/config"
	"keelson.dev/keelson/controlplane/server"
)

// accessFlags adds the flags of authentication and authorization, with the names that
// kube-apiserver uses. After the flags are parsed, finish validates their combination.
func accessFlags(c *cobra.Command, cfg *server.Config) (finish func() error) {
	anonymous := authenticationFlags(c, &cfg.Access.Authentication)
	authorizationFlags(c, &cfg.Access.Authorization)
	return func() error {
		if c.Flags().Changed("anonymous-auth") {
			cfg.Access.Authentication.Anonymous = anonymous
		}
		if err := cfg.Access.Authentication.Check(); err != nil {
			return err
		}
		return cfg.Access.Authorization.Check()
	}
}

func authenticationFlags(c *cobra.Command, o *authnfile.Options) (anonymous *bool) {
	*o = authnfile.Defaults()
	f := c.Flags()
	f.StringVar(&o.ConfigFile, "authentication-config", "",
		"file with an AuthenticationConfiguration: OIDC issuers, and the paths that allow anonymous requests; "+
			"reloaded when it changes")
	anonymous = f.Bool("anonymous-auth", true, "allow requests without credentials as the user system:anonymous")
	f.StringVar(&o.OIDC.IssuerURL, "oidc-issuer-url", "",
		"URL of the issuer of OIDC tokens; for more issuers or options, use --authentication-config")
	f.StringVar(&o.OIDC.ClientID, "oidc-client-id", "", "client ID that OIDC tokens must have as their audience")
	f.StringVar(&o.OIDC.CAFile, "oidc-ca-file", "",
		"file with the CA certificates of the OIDC issuer (default: the system's)")
	f.StringVar(&o.OIDC.UsernameClaim, "oidc-username-claim", o.OIDC.UsernameClaim,
		"claim of OIDC tokens that is used as the user name")
	f.StringVar(&o.OIDC.UsernamePrefix, "oidc-username-prefix", "",
		"prefix of the user names of OIDC tokens; '-' for none (default: the issuer's URL and '#'; none for "+
			"the claim email)")
	f.StringVar(&o.OIDC.GroupsClaim, "oidc-groups-claim", "", "claim of OIDC tokens that is used as the user's groups")
	f.StringVar(&o.OIDC.GroupsPrefix, "oidc-groups-prefix", "", "prefix of the groups of OIDC tokens")
	f.StringSliceVar(&o.OIDC.SigningAlgs, "oidc-signing-algs", o.OIDC.SigningAlgs,
		"signature algorithms that are accepted for OIDC tokens")
	f.StringToStringVar(&o.OIDC.RequiredClaims, "oidc-required-claim", nil,
		"key=value of a claim that OIDC tokens must have (repeatable)")
	f.StringVar(&o.TokenFile, "token-auth-file", "",
		"file of static tokens, with lines of token,user,uid,\"group1,group2\"; reloaded when it changes")
	f.StringVar(&o.WebhookConfig, "authentication-token-webhook-config-file", "",
		"kubeconfig of a webhook that authenticates bearer tokens with TokenReviews")
	f.StringVar(&o.WebhookVersion, "authentication-token-webhook-version", o.WebhookVersion,
		"API version of the TokenReviews sent to the authentication webhook: v1 or v1beta1")
	f.DurationVar(&o.WebhookTTL, "authentication-token-webhook-cache-ttl", o.WebhookTTL,
		"how long responses of the authentication webhook are cached")
	f.BoolVar(&o.BootstrapTokens, "enable-bootstrap-token-auth", false,
		"allow authentication with Secrets of type bootstrap.kubernetes.io/token in kube-system")
	h := &o.RequestHeader
	f.StringVar(&h.ClientCAFile, "requestheader-client-ca-file", "",
		"file with the CA certificates of authenticating proxies, whose user headers are trusted")
	f.StringSliceVar(&h.AllowedNames, "requestheader-allowed-names", nil,
		"common names of the client certificates of authenticating proxies (default: any that the CA has signed)")
	f.StringSliceVar(&h.UsernameHeaders, "requestheader-username-headers", nil,
		"request headers in which an authenticating proxy sends the user name, such as X-Remote-User")
	f.StringSliceVar(&h.UIDHeaders, "requestheader-uid-headers", nil,
		"request headers in which an authenticating proxy sends the user's uid, such as X-Remote-Uid")
	f.StringSliceVar(&h.GroupHeaders, "requestheader-group-headers", nil,
		"request headers in which an authenticating proxy sends the user's groups, such as X-Remote-Group")
	f.StringSliceVar(&h.ExtraPrefixes, "requestheader-extra-headers-prefix", nil,
		"prefixes of request headers in which an authenticating proxy sends extra attributes, such as X-Remote-Extra-")
	return anonymous
}

func authorizationFlags(c *cobra.Command, o *authzfile.Options) {
	*o = authzfile.Defaults()
	f := c.Flags()
	f.StringVar(&o.ConfigFile, "authorization-config", "",
		"file with an AuthorizationConfiguration: the authorizers in order; reloaded when it changes")
	f.StringSliceVar(&o.Modes, "authorization-mode", nil,
		"authorizers in order: Node, RBAC, ABAC, Webhook, AlwaysAllow, AlwaysDeny (default Node,RBAC)")
	f.StringVar(&o.PolicyFile, "authorization-policy-file", "",
		"file with one ABAC policy per line, for the authorizer ABAC; reloaded when it changes")
	f.StringVar(&o.WebhookConfig, "authorization-webhook-config-file", "",
		"kubeconfig of a webhook that handles SubjectAccessReviews, for the authorizer Webhook")
	f.StringVar(&o.WebhookVersion, "authorization-webhook-version", o.WebhookVersion,
		"API version of the SubjectAccessReviews sent to the authorization webhook: v1 or v1beta1")
	f.DurationVar(&o.AuthorizedTTL, "authorization-webhook-cache-authorized-ttl", o.AuthorizedTTL,
		"how long responses of the authorization webhook that allow a request are cached")
	f.DurationVar(&o.UnauthorizedTTL, "authorization-webhook-cache-unauthorized-ttl", o.UnauthorizedTTL,
		"how long responses of the authorization webhook that do not allow a request are cached")
}
