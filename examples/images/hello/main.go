// Command hello is the example workload: a web server that returns the name of its pod. Its flags
// and paths simulate failures.
//
// On SIGTERM it exits without losing a request. A Service stops sending requests before the signal,
// but requests that are already on their way still arrive. The server responds to them until no
// connection has arrived for -linger, and then closes its listener.
//
//	GET /         "hello from POD (VERSION)" and the content of the config file
//	GET /healthz  200 once started; 503 before and while draining
//	GET /exit     ?code=N: exits with this code
//	GET /hog      ?mib=N: allocates and keeps this much memory
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

type server struct {
	pod, version, config string
	ready                atomic.Bool
	exit                 chan int

	mu        sync.Mutex
	allocated [][]byte // memory that /hog allocated
}

func main() {
	listen := flag.String("listen", ":8080", "address to serve on")
	config := flag.String("config", "/etc/hello/message", "file with text for the response; may be missing")
	slow := flag.Duration("slow-start", 0, "how long /healthz returns 503 after the start")
	exitAfter := flag.Duration("exit-after", 0, "exit after this time; 0 = never")
	exitCode := flag.Int("exit-code", 0, "exit code for -exit-after")
	hog := flag.Int("hog", 0, "MiB of memory to allocate at the start")
	linger := flag.Duration("linger", 250*time.Millisecond,
		"after SIGTERM, serve until no request has arrived for this long")
	drain := flag.Duration("drain", 10*time.Second,
		"limit of the shutdown after SIGTERM, including -linger and open requests")
	flag.Parse()

	s := &server{pod: os.Getenv("POD_NAME"), version: os.Getenv("HELLO_VERSION"), config: *config,
		exit: make(chan int, 1)}
	if s.pod == "" {
		s.pod, _ = os.Hostname()
	}
	if *hog > 0 {
		s.allocateMemory(*hog)
	}
	time.AfterFunc(*slow, func() { s.ready.Store(true) })
	if *exitAfter > 0 {
		time.AfterFunc(*exitAfter, func() { s.requestExit(*exitCode) })
	}
	os.Exit(s.serveRequests(*listen, *linger, *drain))
}

// serveRequests serves requests until SIGTERM, SIGINT or a request for /exit. It returns the exit
// code.
func (s *server) serveRequests(listen string, linger, drain time.Duration) int {
	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", s.serveHello)
	mux.HandleFunc("GET /healthz", s.serveHealth)
	mux.HandleFunc("GET /exit", func(w http.ResponseWriter, r *http.Request) { s.requestExit(queryNumber(r, "code")) })
	mux.HandleFunc("GET /hog", func(w http.ResponseWriter, r *http.Request) { s.allocateMemory(queryNumber(r, "mib")) })
	l, err := net.Listen("tcp", listen)
	if err != nil {
		log.Print(err)
		return 1
	}
	var callers idleTracker
	h := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, ConnState: callers.recordConnState}
	go func() {
		if err := h.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Print(err)
			s.requestExit(1)
		}
	}()
	log.Printf("hello %s of pod %s serves on %s", s.version, s.pod, l.Addr())
	select {
	case code := <-s.exit:
		return code
	case <-stop.Done():
	}
	s.ready.Store(false)
	log.Print("draining")
	ctx, done := context.WithTimeout(context.Background(), drain)
	defer done()
	h.SetKeepAlivesEnabled(false) // the next request of each client uses a new connection, to another pod
	callers.awaitIdle(ctx, linger, drain/2)
	// Shutdown resets connections that are still in the queue of the kernel, and drops requests
	// that it has read but not started. It is therefore the last step.
	if err := h.Shutdown(ctx); err != nil {
		log.Print(err)
		return 1
	}
	return 0
}

// idleTracker stores the time of the last connection or request. The zero value is ready to use.
type idleTracker struct {
	mu   sync.Mutex
	last time.Time
}

// recordConnState is the ConnState function of an http.Server.
func (q *idleTracker) recordConnState(_ net.Conn, state http.ConnState) {
	if state != http.StateNew && state != http.StateActive {
		return
	}
	q.mu.Lock()
	q.last = time.Now()
	q.mu.Unlock()
}

// awaitIdle returns when nothing has arrived for linger, counted from the call, or after limit.
func (q *idleTracker) awaitIdle(ctx context.Context, linger, limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	begin := time.Now()
	for {
		q.mu.Lock()
		since := q.last
		q.mu.Unlock()
		if since.Before(begin) {
			since = begin
		}
		left := linger - time.Since(since)
		if left <= 0 {
			return
		}
		select {
		case <-time.After(left):
		case <-ctx.Done():
			return
		}
	}
}

func (s *server) serveHello(w http.ResponseWriter, r *http.Request) {
	fmt.Fprintf(w, "hello from %s (%s)\n", s.pod, s.version)
	if text, err := os.ReadFile(s.config); err == nil {
		_, _ = w.Write(text)
	}
}

func (s *server) serveHealth(w http.ResponseWriter, r *http.Request) {
	if !s.ready.Load() {
		http.Error(w, "not ready", http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}

func (s *server) requestExit(code int) {
	select {
	case s.exit <- code:
	default:
	}
}

// allocateMemory allocates memory and writes to each page, so that the kernel really assigns the
// pages.
func (s *server) allocateMemory(mib int) {
	for range mib {
		b := make([]byte, 1<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		s.mu.Lock()
		s.allocated = append(s.allocated, b)
		s.mu.Unlock()
	}
}

func queryNumber(r *http.Request, name string) int {
	n, err := strconv.Atoi(r.URL.Query().Get(name))
	if err != nil || n < 0 {
		return 0
	}
	return n
}
